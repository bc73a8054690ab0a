//! How much memory the process holds, and has held at most: what a cache costs together with everything around it.
//!
//! Invariant: the kernel's own account of resident pages, files that are mapped (the model's) included; the peak never falls.

/// Most bytes that were resident at once since the process started; `None` where the system does not tell.
pub fn peak_rss_bytes() -> Option<u64> {
    // `getrusage` would hand down the peak of the program that started this one.
    parse(
        &std::fs::read_to_string("/proc/self/status").ok()?,
        "VmHWM:",
    )
}

/// Bytes that are resident now; `None` where the system does not tell.
pub fn rss_bytes() -> Option<u64> {
    parse(
        &std::fs::read_to_string("/proc/self/status").ok()?,
        "VmRSS:",
    )
}

/// A line of Linux's account of a process.
fn parse(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|l| l.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_found_and_read() {
        let status = "VmPeak:\t   99 kB\nVmHWM:\t  412 kB\nVmRSS:\t   50 kB\n";
        assert_eq!(parse(status, "VmHWM:"), Some(412 * 1024));
        assert_eq!(parse(status, "VmRSS:"), Some(50 * 1024));
        assert_eq!(parse("VmRSS:\t   50 kB\n", "VmHWM:"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn it_rises_by_what_is_held() {
        let before = peak_rss_bytes().unwrap();
        let n_bytes = before as usize + (64 << 20);
        std::hint::black_box(vec![1u8; n_bytes]);
        assert!(peak_rss_bytes().unwrap() >= n_bytes as u64);
        assert!(rss_bytes().unwrap() <= peak_rss_bytes().unwrap());
    }
}
