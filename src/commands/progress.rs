//! Progress on the terminal: of fetching, and of a run.

use std::sync::Mutex;

use indicatif::{ProgressBar, ProgressStyle};

use crate::model::source::FetchProgress;

/// A bar on standard error; it hides itself when that is no terminal.
#[derive(Debug, Default)]
pub struct Bar(Mutex<Option<ProgressBar>>);

impl Bar {
    fn with(&self, act: impl FnOnce(&ProgressBar)) {
        if let Ok(bar) = self.0.lock()
            && let Some(bar) = bar.as_ref()
        {
            act(bar);
        }
    }
}

impl FetchProgress for Bar {
    fn begin(&self, what: &str, n_bytes: Option<u64>) {
        let bar = n_bytes.map_or_else(ProgressBar::new_spinner, ProgressBar::new);
        let template = "{msg} {bar:30} {bytes}/{total_bytes} {bytes_per_sec}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message(what.to_owned());
        if let Ok(mut slot) = self.0.lock() {
            *slot = Some(bar);
        }
    }

    fn advance(&self, n_bytes: u64) {
        self.with(|bar| bar.inc(n_bytes));
    }

    fn note(&self, line: &str) {
        self.with(|bar| bar.suspend(|| ()));
        eprintln!("{line}");
    }

    fn end(&self) {
        self.with(ProgressBar::finish_and_clear);
    }
}

/// A bar over a run's items, with the time that is left.
pub fn items(n: usize) -> ProgressBar {
    let bar = ProgressBar::new(n as u64);
    if let Ok(style) =
        ProgressStyle::with_template("{bar:24} {pos}/{len} {msg} [{elapsed}, {eta} left]")
    {
        bar.set_style(style);
    }
    bar.enable_steady_tick(std::time::Duration::from_millis(500));
    bar
}
