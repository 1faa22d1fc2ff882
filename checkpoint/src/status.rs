//! What the kernel tells of a process or a thread in `/proc/PID/status`.

/// A snapshot of it.
#[derive(Clone, Debug)]
pub struct Status(String);

impl Status {
    /// Of a process or thread by its number, while it exists.
    pub fn of(id: i32) -> Option<Status> {
        std::fs::read_to_string(format!("/proc/{id}/status"))
            .ok()
            .map(Status)
    }

    /// What a line says that begins with this name and a colon.
    pub fn field(&self, name: &str) -> Option<&str> {
        self.0
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
            .map(str::trim)
    }

    /// A field that is one number, or begins with one.
    pub fn number<T: std::str::FromStr>(&self, name: &str) -> Option<T> {
        self.field(name)?.split_whitespace().next()?.parse().ok()
    }

    /// Memory that the process has, in bytes: what is resident, and what is swapped out, which comes along as well. None of a
    /// process that has given it up.
    pub fn memory_bytes(&self) -> Option<u64> {
        let kib = self
            .number::<u64>("VmRSS")?
            .saturating_add(self.number("VmSwap").unwrap_or(0));
        Some(kib.saturating_mul(1024))
    }

    /// A set of capabilities (`CapEff`, …): bit 0 is the one with number 0.
    pub fn capabilities(&self, name: &str) -> u64 {
        self.signals(name)
    }

    /// A set of signals (`SigPnd`, `SigBlk`, …): bit 0 is signal 1.
    pub fn signals(&self, name: &str) -> u64 {
        self.field(name)
            .and_then(|hex| u64::from_str_radix(hex, 16).ok())
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let status = Status(
            "Name:\tSigPnd: x\nTgid:\t12\nUid:\t1\t2\t3\t4\nVmRSS:\t  344 kB\nSigPnd:\t0000000000000010\n".into(),
        );
        assert_eq!(status.field("Name"), Some("SigPnd: x"));
        assert_eq!(status.field("Uid"), Some("1\t2\t3\t4"));
        assert_eq!(
            (status.number::<i32>("Tgid"), status.number::<u64>("VmRSS")),
            (Some(12), Some(344))
        );
        assert_eq!(
            (status.signals("SigPnd"), status.signals("SigBlk")),
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

    #[test]
    fn what_is_swapped_out_is_memory_that_a_process_has() {
        let of = |text: &str| Status(text.into()).memory_bytes();
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
    fn a_process_is_found_while_it_exists() {
        let own = Status::of(std::process::id() as i32).expect("it runs");
        assert_eq!(
            own.number::<u32>("PPid"),
            Some(std::os::unix::process::parent_id())
        );
        assert!(Status::of(-1).is_none());
    }
}
