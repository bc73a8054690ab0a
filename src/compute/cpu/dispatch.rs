//! Functions compiled for several instruction sets, one of which is chosen at run time.
//!
//! Invariant: a body is written once, in operations that round the same way everywhere, so every level gives the same
//! bits. Unit tests can ask for a level (`tests::at`) and compare.

/// Instruction sets that a `multiversion!` function is compiled for, in rising order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// What every machine of the target has: the scalar twin of the others.
    Baseline,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, VL, BW and DQ, and FMA.
    Avx512,
}

impl Level {
    /// The highest level of this machine.
    #[inline]
    pub fn detected() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let fma = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            if fma
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
            {
                return Level::Avx512;
            }
            if fma {
                return Level::Avx2;
            }
        }
        Level::Baseline
    }
}

/// Defines a function whose body is compiled for each [`Level`].
macro_rules! multiversion {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:path;) => {
        $(#[$meta])*
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                use $crate::compute::cpu::dispatch::{Level, level};

                #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
                fn v4($($arg: $ty),*) $(-> $ret)? {
                    $body($($arg),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn v3($($arg: $ty),*) $(-> $ret)? {
                    $body($($arg),*)
                }
                match level() {
                    // SAFETY: the instruction sets were detected on this machine.
                    Level::Avx512 => return unsafe { v4($($arg),*) },
                    // SAFETY: the instruction sets were detected on this machine.
                    Level::Avx2 => return unsafe { v3($($arg),*) },
                    Level::Baseline => {}
                }
            }
            $body($($arg),*)
        }
    };
}
pub(crate) use multiversion;

/// The level that functions run at.
#[cfg(not(test))]
#[inline]
pub(crate) fn level() -> Level {
    Level::detected()
}

#[cfg(test)]
pub(crate) use tests::level;

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::Cell;

    use super::Level;

    thread_local! {
        static HIGHEST: Cell<Level> = const { Cell::new(Level::Avx512) };
    }

    pub(crate) fn level() -> Level {
        Level::detected().min(HIGHEST.get())
    }

    /// The levels of this machine.
    pub(crate) fn levels() -> impl Iterator<Item = Level> {
        [Level::Baseline, Level::Avx2, Level::Avx512]
            .into_iter()
            .filter(|&l| l <= Level::detected())
    }

    /// What `f` gives on this thread when no level above `highest` is used.
    pub(crate) fn at<T>(highest: Level, f: impl FnOnce() -> T) -> T {
        let before = HIGHEST.replace(highest);
        let result = f();
        HIGHEST.set(before);
        result
    }

    #[inline(always)]
    fn products_body(x: &mut [f32], y: &[f32]) {
        for (x, y) in x.iter_mut().zip(y) {
            *x = x.mul_add(*y, 0.1) * y + 0.3;
        }
    }

    multiversion! {
        fn products(x: &mut [f32], y: &[f32]) = products_body;
    }

    #[test]
    fn the_level_asked_for_runs_and_gives_the_same_bits() {
        let y: Vec<f32> = (0..100).map(|i| i as f32 * 0.37 - 11.0).collect();
        let mut want = y.clone();
        products_body(&mut want, &y);
        for l in levels() {
            let mut x = y.clone();
            at(l, || {
                assert_eq!(level(), l);
                products(&mut x, &y);
            });
            assert_eq!(x, want, "{l:?}");
        }
        assert_eq!(level(), Level::detected());
    }
}
