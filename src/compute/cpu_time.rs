//! The CPU time of this process, from the system call itself; `engine::clock` is its one reader.

use std::time::Duration;

/// CPU time of all threads since the process started; zero where the system does not tell.
#[cfg(unix)]
pub fn process_cpu() -> Duration {
    let mut t = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the pointer is valid for the call; on failure `t` keeps its zeros.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut t) };
    Duration::new(
        u64::try_from(t.tv_sec).unwrap_or(0),
        u32::try_from(t.tv_nsec).unwrap_or(0),
    )
}

/// CPU time of all threads since the process started; zero where the system does not tell.
#[cfg(not(unix))]
pub fn process_cpu() -> Duration {
    Duration::ZERO
}

#[cfg(test)]
mod tests {

    /// The scalar twin is the kernel's own account, which it brings up to date at each tick.
    #[cfg(target_os = "linux")]
    #[test]
    fn agrees_with_proc() {
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
        let fields: Vec<&str> = stat
            .rsplit_once(')')
            .unwrap()
            .1
            .split_whitespace()
            .collect();
        let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
        let (told, now) = (ticks as f64 / 100.0, super::process_cpu().as_secs_f64());
        assert!(now > 0.0 && (now - told).abs() < 0.5, "{now} {told}");
    }
}
