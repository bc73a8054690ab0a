//! Time: the one place that asks the system for it.
//!
//! Invariant: everything else takes a [`Clock`], so a scripted one makes a whole run repeatable. On a shared machine CPU
//! time tells more than wall time: read both.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::cache::sparse::Timer;
use crate::compute::cpu_time::process_cpu;

/// One reading of a clock.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reading {
    /// Wall time since the clock was made.
    pub wall: Duration,
    /// CPU time of all threads of the process, since it started; zero where the system does not tell.
    pub cpu: Duration,
}

impl Reading {
    /// What went by since an earlier reading.
    pub fn since(self, earlier: Reading) -> Reading {
        Reading {
            wall: self.wall.saturating_sub(earlier.wall),
            cpu: self.cpu.saturating_sub(earlier.cpu),
        }
    }

    /// Wall time in milliseconds.
    pub fn wall_ms(self) -> f64 {
        self.wall.as_secs_f64() * 1e3
    }

    /// CPU time in milliseconds.
    pub fn cpu_ms(self) -> f64 {
        self.cpu.as_secs_f64() * 1e3
    }
}

/// Something that tells time.
pub trait Clock: Send + Sync {
    /// The time now.
    fn read(&self) -> Reading;

    /// Wall time alone, which costs far less to ask for: parts of a step are timed with it.
    fn wall(&self) -> Duration {
        self.read().wall
    }

    /// The same to be given away; a clock that can't be shared shows one that stands still.
    fn timer(&self) -> Timer {
        Arc::new(|| Duration::ZERO)
    }
}

/// The system's clocks.
#[derive(Debug, Clone)]
pub struct SystemClock {
    start: Instant,
}

impl SystemClock {
    /// A clock whose wall time starts now.
    pub fn new() -> Self {
        Self {
            start: Instant::now(),
        }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn read(&self) -> Reading {
        Reading {
            wall: self.wall(),
            cpu: process_cpu(),
        }
    }

    fn wall(&self) -> Duration {
        self.start.elapsed()
    }

    fn timer(&self) -> Timer {
        let start = self.start;
        Arc::new(move || start.elapsed())
    }
}

/// A clock that moves by a fixed step at each reading: the n-th reading (from 0) is `n · step`, wall and CPU alike.
#[derive(Debug)]
pub struct ScriptedClock {
    step: Duration,
    n_read: Mutex<u32>,
}

impl ScriptedClock {
    /// A clock with that step.
    pub fn new(step: Duration) -> Self {
        Self {
            step,
            n_read: Mutex::new(0),
        }
    }
}

impl Clock for ScriptedClock {
    fn read(&self) -> Reading {
        // A counter is whole even if another reader panicked.
        let mut n = self.n_read.lock().unwrap_or_else(|e| e.into_inner());
        let now = self.step * *n;
        *n += 1;
        Reading {
            wall: now,
            cpu: now,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_takes_wall_and_cpu_time() {
        let clock = SystemClock::new();
        let before = clock.read();
        let mut x = 1u64;
        let mut spent = Reading::default();
        for _ in 0..10_000 {
            x = (0..10_000).fold(x, |x, i| x.wrapping_mul(6_364_136_223_846_793_005) ^ i);
            spent = clock.read().since(before);
            if cfg!(not(unix)) || spent.cpu > Duration::from_millis(5) {
                break;
            }
        }
        assert_ne!(x, 0);
        assert!(spent.wall > Duration::ZERO);
        assert!(cfg!(not(unix)) || spent.cpu_ms() > 5.0, "{spent:?}");
    }

    #[test]
    fn a_scripted_clock_repeats_itself() {
        let clock = ScriptedClock::new(Duration::from_millis(3));
        let readings: Vec<f64> = (0..3).map(|_| clock.read().wall_ms()).collect();
        assert_eq!(readings, [0.0, 3.0, 6.0]);
        let (a, b) = (clock.read(), clock.read());
        assert_eq!(b.since(a).cpu, Duration::from_millis(3));
        assert_eq!(a.since(b).cpu, Duration::ZERO);
    }
}
