//! What it costs to share out parts of a few microseconds: `cargo bench --bench team`.
//!
//! A token's step through SmolLM2 is some 150 parallel parts with serial work between them. Here is such a step of made-up work, wall
//! time per step: the pool alone, whose threads may go to sleep between parts, and the team that stays awake. Both take turns,
//! forwards and backwards; a ratio is of two times of the same round. `ideal` is the work alone, divided by the threads.

use std::hint::black_box;
use std::time::Duration;

use kvlab::compute::cpu::team;
use kvlab::engine::clock::{Clock, SystemClock};

const N_PARTS: usize = 150;
const N_TASKS: usize = 24;
const N_STEPS: usize = 20;
const N_ROUNDS: usize = 21;
/// Products and sums in a chain, a few nanoseconds each: of a task, and of the serial work before a part.
const LENGTHS: [(usize, usize); 3] = [(500, 2_000), (500, 10_000), (2_000, 10_000)];

fn work(n: usize) -> f32 {
    (0..n).fold(black_box(0.5), |x: f32, _| x * 0.999 + 0.1)
}

fn step((task, serial): (usize, usize)) {
    for _ in 0..N_PARTS {
        black_box(work(serial));
        team::for_each_init(
            N_TASKS,
            || (),
            |(), _| {
                black_box(work(task));
            },
        );
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let clock = SystemClock::new();
    let timed = |run: &mut dyn FnMut()| {
        let start = clock.read();
        (0..N_STEPS).for_each(|_| run());
        clock.read().since(start).wall / N_STEPS as u32
    };
    let n_threads = rayon::current_num_threads();
    println!(
        "{n_threads} threads, {N_PARTS} parts of {N_TASKS} tasks, ms per step, medians of {N_ROUNDS} rounds\n"
    );
    println!(
        "| task us | serial us | ideal | pool | team | pool / team |\n|---|---|---|---|---|---|"
    );
    for lengths in LENGTHS {
        let alone = |n: usize| {
            timed(&mut || {
                black_box(work(n));
            })
        };
        let (task, serial) = (alone(lengths.0), alone(lengths.1));
        let ideal = (task * N_TASKS as u32 / n_threads as u32 + serial) * N_PARTS as u32;
        let mut pool = || rayon::scope(|_| step(lengths));
        let mut gathered = || team::gathered(|| step(lengths));
        let mut times: Vec<[Duration; 2]> = Vec::new();
        for round in 0..=N_ROUNDS {
            let pair = match round % 2 {
                0 => [timed(&mut pool), timed(&mut gathered)],
                _ => {
                    let second = timed(&mut gathered);
                    [timed(&mut pool), second]
                }
            };
            // The first round warms up.
            if round > 0 {
                times.push(pair);
            }
        }
        let ms = |i: usize| median(times.iter().map(|t| t[i].as_secs_f64() * 1e3).collect());
        let ratio = median(
            times
                .iter()
                .map(|t| t[0].as_secs_f64() / t[1].as_secs_f64())
                .collect(),
        );
        println!(
            "| {:.2} | {:.2} | {:.2} | {:.2} | {:.2} | {ratio:.2} |",
            task.as_secs_f64() * 1e6,
            serial.as_secs_f64() * 1e6,
            ideal.as_secs_f64() * 1e3,
            ms(0),
            ms(1),
        );
    }
}
