//! What this process has used, as the operating system counts it. Thread ranks share one process, so these are
//! figures of all its ranks together.

/// Most bytes of memory that were resident at once since the process started; `None` where unknown (only
/// Linux says).
pub fn peak_resident_bytes() -> Option<u64> {
    status_bytes("VmHWM:")
}

/// Starts the peak anew from what is resident now, where the system can (Linux); else it stays as it was.
pub fn reset_peak_resident() {
    // A kernel that refuses leaves the old peak, which the caller compares with the one before.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// Bytes of memory that are resident now; `None` where unknown.
pub fn resident_bytes() -> Option<u64> {
    status_bytes("VmRSS:")
}

/// Seconds of processor time over all threads since the process started; 0 where unknown (not a Unix).
pub fn process_cpu_seconds() -> f64 {
    #[cfg(unix)]
    {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
    }
    #[cfg(not(unix))]
    0.0
}

/// A line such as `VmHWM:     1234 kB` of `/proc/self/status`, which only Linux has.
fn status_bytes(key: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(key))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn memory_and_time_that_are_used_are_counted() {
        let (before, cpu_before) = (peak_resident_bytes().unwrap(), process_cpu_seconds());
        let buffer: Vec<u64> = (0..16 << 20).collect();
        let sum = buffer
            .iter()
            .fold(0_u64, |a, b| a.wrapping_mul(31).wrapping_add(*b));
        assert_ne!(std::hint::black_box(sum), 0);
        assert!(resident_bytes().unwrap() >= 128 << 20);
        assert!(peak_resident_bytes().unwrap() >= before.max(128 << 20));
        assert!(process_cpu_seconds() > cpu_before);
        drop(buffer);
        assert!(
            peak_resident_bytes().unwrap() >= 128 << 20,
            "the peak stays"
        );
        reset_peak_resident();
        assert!(peak_resident_bytes().unwrap() >= resident_bytes().unwrap() / 2);
    }
}
