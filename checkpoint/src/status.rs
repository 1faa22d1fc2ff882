//! Reads `/proc/PID/status` of a process or thread.

/// The text of a `/proc/PID/status` file.
#[derive(Clone, Debug)]
pub struct ProcStatus(String);

impl ProcStatus {
    /// Reads the status of the process or thread with the id `id`; `None` if it does not exist.
    pub fn read(id: i32) -> Option<ProcStatus> {
        std::fs::read_to_string(format!("/proc/{id}/status"))
            .ok()
            .map(ProcStatus)
    }

    /// Returns the value of the field with this name, without surrounding white space; `None` if
    /// the field is missing.
    pub fn field(&self, name: &str) -> Option<&str> {
        self.0
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
            .map(str::trim)
    }

    /// Returns the number at the beginning of a field; `None` if the field is missing or not a
    /// number.
    pub fn number<T: std::str::FromStr>(&self, name: &str) -> Option<T> {
        self.field(name)?.split_whitespace().next()?.parse().ok()
    }

    /// Returns the memory of the process in bytes: resident memory plus swapped-out memory, which
    /// is dumped as well. `None` for an exiting process that has released its memory.
    pub fn memory_bytes(&self) -> Option<u64> {
        let kib = self
            .number::<u64>("VmRSS")?
            .saturating_add(self.number("VmSwap").unwrap_or(0));
        Some(kib.saturating_mul(1024))
    }

    /// Returns the capability set in the field `name` (`CapEff`, …): bit 0 is capability 0.
    pub fn capability_set(&self, name: &str) -> u64 {
        self.signal_set(name)
    }

    /// Returns the signal set in the field `name` (`SigPnd`, `SigBlk`, …): bit 0 is signal 1.
    pub fn signal_set(&self, name: &str) -> u64 {
        self.field(name)
            .and_then(|hex| u64::from_str_radix(hex, 16).ok())
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_full_name() {
        let status = ProcStatus(
            "Name:\tSigPnd: x\nTgid:\t12\nUid:\t1\t2\t3\t4\nVmRSS:\t  344 kB\nSigPnd:\t0000000000000010\n".into(),
        );
        assert_eq!(status.field("Name"), Some("SigPnd: x"));
        assert_eq!(status.field("Uid"), Some("1\t2\t3\t4"));
        assert_eq!(
            (status.number::<i32>("Tgid"), status.number::<u64>("VmRSS")),
            (Some(12), Some(344))
        );
        assert_eq!(
            (status.signal_set("SigPnd"), status.signal_set("SigBlk")),
            (0x10, 0)
        );
        assert_eq!(
            (
                status.field("gid"),
                status.field("Sig"),
                status.number::<i32>("Name")
            ),
            (None, None, None)
        );
    }

    /// Swapped-out memory counts as memory of the process.
    #[test]
    fn swapped_memory_counts() {
        let of = |text: &str| ProcStatus(text.into()).memory_bytes();
        assert_eq!(
            of("VmRSS:\t  344 kB\nVmSwap:\t 2097152 kB\n"),
            Some((344 + (2 << 20)) << 10)
        );
        assert_eq!(
            of("VmRSS:\t  344 kB\n"),
            Some(344 << 10),
            "a kernel without swap"
        );
        assert_eq!(of("State:\tZ (zombie)\n"), None);
    }

    #[test]
    fn status_exists_for_running_process() {
        let own = ProcStatus::read(std::process::id() as i32).expect("it runs");
        assert_eq!(
            own.number::<u32>("PPid"),
            Some(std::os::unix::process::parent_id())
        );
        assert!(ProcStatus::read(-1).is_none());
    }
}
