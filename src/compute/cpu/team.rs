//! Threads that stay awake while one token passes through the model.
//!
//! A token's step is a few hundred parallel parts of some microseconds, and short serial work between them. A pool's thread goes to
//! sleep meanwhile, and waking it takes as long as a part. So such a step gathers its pool's threads once: they look for parts until
//! the step is done.
//!
//! Invariants: there is one team at a time; other steps, and other threads, share their work out through the pool as ever. A member
//! takes up nothing but parts of steps, which are finite, so that nobody who waits for it waits for ever; a task, in turn, never
//! waits for the pool, whose threads are all members. Who does which task never shows in what tasks compute.
//!
//! ```text
//! leader    serial   part 1: tasks 0 1 2 3 | serial   part 2: tasks 0 1 …      each has tasks of its own, in order,
//! member    looks            tasks 4 5 6 7 | looks            tasks 2 3 …      and then helps out the others
//! ```

use std::any::Any;
use std::cell::UnsafeCell;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::{self, ThreadId};

use rayon::prelude::*;

/// Members that have tasks of their own; there may be more.
const SHARES: usize = 64;
/// How often a thread looks for a part before it lets others have its core.
const LOOKS: usize = 1000;

/// A counter in a cache line of its own, and of the neighbour that comes with it.
#[repr(align(128))]
struct Apart(AtomicUsize);

impl Apart {
    const fn zero() -> Self {
        Self(AtomicUsize::new(0))
    }
}

/// What a part asks of each member: to take tasks until there are none.
type Work<'a> = dyn Fn(usize) + Sync + 'a;

struct Team {
    /// Who leads a step, if one goes on.
    leader: Mutex<Option<ThreadId>>,
    /// Threads, the leader too.
    n: AtomicUsize,
    /// The number of the part that goes on; 0 between parts.
    part: Apart,
    /// Members that may be at work.
    at_work: Apart,
    /// The next task of each share.
    next: [Apart; SHARES],
    /// Parts so far.
    n_parts: AtomicUsize,
    work: UnsafeCell<Option<*const Work<'static>>>,
    /// What a member's task panicked with.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `work` is written by the leader alone, while no part goes on and no member is at work, and read by members at work, after
// they have seen that a part goes on.
unsafe impl Sync for Team {}

static TEAM: Team = Team {
    leader: Mutex::new(None),
    n: AtomicUsize::new(1),
    part: Apart::zero(),
    at_work: Apart::zero(),
    next: [const { Apart::zero() }; SHARES],
    n_parts: AtomicUsize::new(0),
    work: UnsafeCell::new(None),
    panic: Mutex::new(None),
};

/// Does a step's work on a thread of the pool, with the pool's other threads gathered around it unless another step has them, or
/// there are more of them than cores.
pub fn gathered<R: Send>(step: impl FnOnce() -> R + Send) -> R {
    // Asking takes tens of microseconds.
    static CORES: OnceLock<usize> = OnceLock::new();
    let cores = || thread::available_parallelism().map_or(1, NonZeroUsize::get);
    gathered_on(*CORES.get_or_init(cores), step)
}

fn gathered_on<R: Send>(n_cores: usize, step: impl FnOnce() -> R + Send) -> R {
    let done = AtomicBool::new(false);
    rayon::scope(|scope| {
        let n = rayon::current_num_threads();
        if n == 1 || n > n_cores || !TEAM.lead(n) {
            return step();
        }
        let _over = Over(&done);
        for member in 1..n {
            let done = &done;
            scope.spawn(move |_| TEAM.serve(member, done));
        }
        step()
    })
}

/// Tasks `0..n`, each once, on the team of this thread's step, or else on the pool; `init` makes what a thread's tasks share. A
/// task must not wait for the pool.
pub fn for_each_init<S>(
    n: usize,
    init: impl Fn() -> S + Send + Sync,
    run: impl Fn(&mut S, usize) + Send + Sync,
) {
    let in_order = || {
        let mut own = init();
        (0..n).for_each(|i| run(&mut own, i));
    };
    if n < 2 {
        return in_order();
    }
    if TEAM.is_led_here() {
        // Within a part all threads have something to do.
        return match TEAM.part.0.load(Ordering::Relaxed) {
            0 => TEAM.share_out(n, &|tasks| {
                let mut own = init();
                tasks.for_each(|i| run(&mut own, i));
            }),
            _ => in_order(),
        };
    }
    (0..n).into_par_iter().for_each_init(init, run);
}

/// An item, and then what was made of it.
type Slot<T, R> = Mutex<(Option<T>, Option<R>)>;

/// What `run` makes of each item, in order; shared out as [`for_each_init`] does.
///
/// # Errors
/// One that `run` gave.
pub fn try_map<T: Send, R: Send, E: Send>(
    items: impl IntoIterator<Item = T>,
    run: impl Fn(T) -> Result<R, E> + Send + Sync,
) -> Result<Vec<R>, E> {
    let slots = items.into_iter().map(|item| Mutex::new((Some(item), None)));
    let slots: Vec<Slot<T, Result<R, E>>> = slots.collect();
    for_each_init(
        slots.len(),
        || (),
        |(), i| {
            let (item, result) = &mut *held(&slots[i]);
            *result = item.take().map(&run);
        },
    );
    let results = slots.into_iter().map(|slot| {
        let (_, result) = slot.into_inner().unwrap_or_else(PoisonError::into_inner);
        result.expect("each task is done once")
    });
    results.collect()
}

/// The end of a step, however it ends.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        *held(&TEAM.leader) = None;
        self.0.store(true, Ordering::Release);
    }
}

/// The end of a part, however it ends: members leave it before what it borrows goes.
struct Closing<'a>(&'a Team);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.part.0.store(0, Ordering::SeqCst);
        let mut looks = 0;
        while self.0.at_work.0.load(Ordering::SeqCst) > 0 {
            pause(&mut looks);
        }
    }
}

/// A member's time at work, however it ends.
struct Leaving<'a>(&'a Team);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.0.at_work.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// One thread's way through the tasks of a part.
struct Tasks<'a> {
    team: &'a Team,
    /// Tasks of the part, and shares of them.
    n: usize,
    n_shares: usize,
    own: usize,
}

impl Tasks<'_> {
    /// Its own share first, then what others have not come to yet.
    fn for_each(&self, mut run: impl FnMut(usize)) {
        for i in 0..self.n_shares {
            let share = (self.own + i) % self.n_shares;
            let end = (share + 1) * self.n / self.n_shares;
            let next = &self.team.next[share].0;
            // A share that is done is left alone: its counter stays small.
            while next.load(Ordering::Relaxed) < end {
                let task = next.fetch_add(1, Ordering::Relaxed);
                if task < end {
                    run(task);
                }
            }
        }
    }
}

impl Team {
    /// Makes this thread the leader of so many, if there is none.
    fn lead(&self, n: usize) -> bool {
        let mut leader = held(&self.leader);
        if leader.is_some() {
            return false;
        }
        *leader = Some(thread::current().id());
        self.n.store(n, Ordering::Relaxed);
        true
    }

    fn is_led_here(&self) -> bool {
        *held(&self.leader) == Some(thread::current().id())
    }

    /// Has all tasks done; the leader takes part.
    fn share_out(&self, n: usize, work: &(dyn Fn(&Tasks<'_>) + Sync)) {
        let n_shares = self.n.load(Ordering::Relaxed).min(SHARES).min(n);
        for (share, next) in self.next.iter().enumerate().take(n_shares) {
            next.0.store(share * n / n_shares, Ordering::Relaxed);
        }
        let of_member = move |member: usize| {
            work(&Tasks {
                team: self,
                n,
                n_shares,
                own: member % n_shares,
            });
        };
        let of_member: &Work<'_> = &of_member;
        // A leader that panicked itself left what a member did.
        *held(&self.panic) = None;
        {
            let closing = Closing(self);
            // SAFETY: no part goes on and no member is at work, by the end of the part before; that the work's lifetime is forgotten
            // is made good by `Closing`, which outlasts every use of it and ends before it does.
            unsafe {
                let forgotten =
                    std::mem::transmute::<*const Work<'_>, *const Work<'static>>(of_member);
                *self.work.get() = Some(forgotten);
            }
            let number = self.n_parts.fetch_add(1, Ordering::Relaxed) + 1;
            self.part.0.store(number, Ordering::SeqCst);
            of_member(0);
            drop(closing);
        }
        let panic = held(&self.panic).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Takes part in a step until it is done.
    fn serve(&self, member: usize, done: &AtomicBool) {
        // A leader that waits for the pool may find this to do; it would wait for itself.
        if self.is_led_here() {
            return;
        }
        let (mut seen, mut looks) = (0, 0);
        while !done.load(Ordering::Acquire) {
            let part = self.part.0.load(Ordering::Relaxed);
            if part == 0 || part == seen {
                pause(&mut looks);
                continue;
            }
            looks = 0;
            self.at_work.0.fetch_add(1, Ordering::SeqCst);
            let _leaving = Leaving(self);
            // Either the leader sees that somebody is at work, and waits, or it is seen here that the part is over.
            let part = self.part.0.load(Ordering::SeqCst);
            if part != 0 {
                seen = part;
                // SAFETY: the part goes on until this member is no longer at work; the work was written before it began.
                let work = unsafe { (*self.work.get()).map(|work| &*work) };
                let outcome = catch_unwind(AssertUnwindSafe(|| {
                    work.into_iter().for_each(|work| work(member))
                }));
                if let Err(panic) = outcome {
                    held(&self.panic).get_or_insert(panic);
                }
            }
        }
    }
}

/// Waits a little; after a while, for as long as others want the core.
fn pause(looks: &mut usize) {
    *looks += 1;
    if *looks < LOOKS {
        std::hint::spin_loop();
    } else {
        thread::yield_now();
    }
}

fn held<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // What is held is whole at any time.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    fn pool(n: usize) -> rayon::ThreadPool {
        rayon::ThreadPoolBuilder::new()
            .num_threads(n)
            .build()
            .expect("a few threads")
    }

    fn counts(n: usize) -> Vec<u32> {
        let counts: Vec<AtomicU32> = (0..n).map(|_| AtomicU32::new(0)).collect();
        for_each_init(
            n,
            || (),
            |(), i| {
                counts[i].fetch_add(1, Ordering::Relaxed);
            },
        );
        counts.into_iter().map(AtomicU32::into_inner).collect()
    }

    #[test]
    fn each_task_is_done_once_in_a_step_and_outside_on_any_number_of_threads() {
        for threads in [1, 2, 3, 7] {
            pool(threads).install(|| {
                for n in [0, 1, 2, 3, 50, 1000] {
                    assert_eq!(counts(n), vec![1; n]);
                    let parts = gathered_on(usize::MAX, || {
                        (0..200).map(|_| counts(n)).collect::<Vec<_>>()
                    });
                    assert!(
                        parts.iter().all(|part| *part == vec![1; n]),
                        "{threads} {n}"
                    );
                }
            });
        }
        assert_eq!(gathered_on(usize::MAX, || counts(9)), [1; 9]);
    }

    #[test]
    fn steps_at_the_same_time_and_the_pool_in_a_step_wait_for_nobody_for_ever() {
        pool(3).install(|| {
            (0..40).into_par_iter().for_each(|_| {
                gathered_on(usize::MAX, || {
                    for n in [2, 30] {
                        assert_eq!(counts(n), vec![1; n]);
                        assert_eq!((0..100usize).into_par_iter().sum::<usize>(), 4950);
                    }
                });
            });
        });
    }

    #[test]
    fn a_part_within_a_part_is_done_by_one_thread() {
        pool(2).install(|| {
            gathered_on(usize::MAX, || {
                for_each_init(
                    8,
                    || (),
                    |(), _| {
                        if TEAM.is_led_here() {
                            assert_eq!(counts(5), [1; 5]);
                        }
                    },
                );
            });
        });
    }

    #[test]
    fn results_stand_in_order_and_an_error_comes_through() {
        let squares = |bad: usize| {
            pool(2).install(|| {
                gathered_on(usize::MAX, || {
                    try_map(0..20, |i| if i == bad { Err(i) } else { Ok(i * i) })
                })
            })
        };
        assert_eq!(squares(99), Ok((0..20).map(|i| i * i).collect()));
        assert_eq!(squares(13), Err(13));
    }

    #[test]
    fn a_panic_comes_through_and_leaves_the_team_whole() {
        pool(2).install(|| {
            // One task, or all of them: then the leader and the member.
            for bad in [0, 7, 15, 99] {
                let run = |i| assert!(i != bad && bad != 99);
                let step = || gathered_on(usize::MAX, || for_each_init(16, || (), |(), i| run(i)));
                assert!(catch_unwind(step).is_err());
                assert_eq!(gathered_on(usize::MAX, || counts(16)), [1; 16]);
            }
        });
    }
}
