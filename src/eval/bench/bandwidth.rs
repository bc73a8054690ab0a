//! How fast this machine reads memory: what achieved bytes per second stand beside.
//!
//! Invariant: the buffer is much larger than any last-level cache, each thread reads one contiguous part of it, and
//! nothing is written.

use std::hint::black_box;

use rayon::prelude::*;

use super::Pool;
use crate::engine::clock::Clock;

/// Size of the buffer that is read, bytes.
pub const BUFFER_BYTES: usize = 1 << 27;

/// Passes; the fastest counts, since anything else the machine does only slows one down.
const PASSES: usize = 5;

/// Bytes per second that the pool's threads read together, best of several passes over `buffer`.
pub fn read_bytes_per_s(clock: &dyn Clock, pool: &Pool, buffer: &[u64]) -> f64 {
    let part = buffer.len().div_ceil(pool.n_threads).max(1);
    let sum = |part: &[u64]| part.iter().fold(0u64, |sum, &x| sum.wrapping_add(x));
    let n_bytes = size_of_val(buffer) as f64;
    pool.pool.install(|| {
        let pass = |_| {
            let start = clock.wall();
            black_box(
                buffer
                    .par_chunks(part)
                    .map(sum)
                    .reduce(|| 0, u64::wrapping_add),
            );
            n_bytes / clock.wall().saturating_sub(start).as_secs_f64()
        };
        (0..PASSES).map(pass).fold(0.0, f64::max)
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::engine::clock::ScriptedClock;

    #[test]
    fn a_pass_of_one_tick_reads_the_buffer_per_tick() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build();
        let pool = Pool {
            n_threads: 2,
            pool: pool.unwrap(),
        };
        let clock = ScriptedClock::new(Duration::from_millis(1));
        assert_eq!(read_bytes_per_s(&clock, &pool, &[1; 1000]), 8.0e6);
    }
}
