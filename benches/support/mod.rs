//! What the benches share: CPU time instead of wall time, so that a busy machine distorts the numbers little.

use std::time::Duration;

use criterion::measurement::{Measurement, ValueFormatter, WallTime};
use kvlab::engine::clock::{Clock, Reading, SystemClock};

/// Process CPU time, printed by a formatter of one's choice.
pub struct CpuTime<F> {
    clock: SystemClock,
    formatter: F,
}

impl<F: ValueFormatter> CpuTime<F> {
    /// CPU time printed by `formatter`.
    pub fn new(formatter: F) -> Self {
        Self {
            clock: SystemClock::new(),
            formatter,
        }
    }
}

impl<F: ValueFormatter> Measurement for CpuTime<F> {
    type Intermediate = Reading;
    type Value = Duration;

    fn start(&self) -> Reading {
        self.clock.read()
    }

    fn end(&self, start: Reading) -> Duration {
        self.clock.read().since(start).cpu
    }

    fn add(&self, a: &Duration, b: &Duration) -> Duration {
        *a + *b
    }

    fn zero(&self) -> Duration {
        Duration::ZERO
    }

    fn to_f64(&self, value: &Duration) -> f64 {
        WallTime.to_f64(value)
    }

    fn formatter(&self) -> &dyn ValueFormatter {
        &self.formatter
    }
}

/// Criterion's own way to print times and throughputs.
pub struct Usual;

impl ValueFormatter for Usual {
    fn scale_values(&self, typical: f64, values: &mut [f64]) -> &'static str {
        WallTime.formatter().scale_values(typical, values)
    }

    fn scale_throughputs(
        &self,
        typical: f64,
        throughput: &criterion::Throughput,
        values: &mut [f64],
    ) -> &'static str {
        WallTime
            .formatter()
            .scale_throughputs(typical, throughput, values)
    }

    fn scale_for_machines(&self, values: &mut [f64]) -> &'static str {
        WallTime.formatter().scale_for_machines(values)
    }
}
