//! Amount, rate and estimated end of a transfer that is under way.

use crate::virtual_machine::{VirtualMachine, describe_host};
use sempa_proto::{HostId, Tid};
use std::fmt;
use std::time::Instant;

/// Measures the transfers of tasks that leave their hosts.
#[derive(Debug, Default)]
pub(crate) struct TransferMeter {
    /// `None` before the first byte.
    amounts: Option<TransferAmounts>,
}

impl TransferMeter {
    /// Asks these hosts for the tasks that `is_measured` selects. A host that does not answer
    /// contributes nothing.
    pub(crate) fn measure(
        &mut self,
        machine: &dyn VirtualMachine,
        hosts: impl IntoIterator<Item = HostId>,
        is_measured: impl Fn(Tid) -> bool,
    ) {
        let (mut sent_bytes, mut resident_bytes) = (0, 0);
        for host in hosts {
            let Ok(report) = describe_host(machine, host, true) else {
                continue;
            };
            let departures = report.departures.iter().filter(|d| is_measured(d.tid));
            sent_bytes += departures.map(|d| d.sent_bytes).sum::<u64>();
            let usages = report
                .task_usages
                .iter()
                .filter(|(tid, _)| is_measured(*tid));
            resident_bytes += usages
                .map(|(_, usage)| usage.resident_max_bytes)
                .sum::<u64>();
        }
        if sent_bytes > 0 {
            let now = Instant::now();
            self.amounts
                .get_or_insert_with(|| TransferAmounts::new(sent_bytes, resident_bytes, now))
                .update(sent_bytes, now);
        }
    }

    /// Returns a description of a step with its amounts, if they are known.
    pub(crate) fn describe(&self, step: impl fmt::Display) -> String {
        match self.amounts {
            Some(amounts) => format!("{step}: {amounts}"),
            None => step.to_string(),
        }
    }
}

/// Amounts of a transfer that is under way.
#[derive(Clone, Copy, Debug)]
struct TransferAmounts {
    sent_bytes: u64,
    /// Resident memory when the transfer was first seen. The images have about this size.
    expected_bytes: u64,
    /// Bytes per second since the transfer was first seen.
    rate: f64,
    first_seen: (Instant, u64),
}

impl TransferAmounts {
    fn new(sent_bytes: u64, expected_bytes: u64, now: Instant) -> Self {
        Self {
            sent_bytes,
            expected_bytes,
            rate: 0.0,
            first_seen: (now, sent_bytes),
        }
    }

    fn update(&mut self, sent_bytes: u64, now: Instant) {
        let (first_at, first_bytes) = self.first_seen;
        let seconds = now.duration_since(first_at).as_secs_f64();
        self.sent_bytes = sent_bytes;
        if seconds > 0.0 {
            self.rate = sent_bytes.saturating_sub(first_bytes) as f64 / seconds;
        }
    }
}

/// Formats the amounts with the estimated time until the end; the estimate is omitted while there
/// is no rate.
impl fmt::Display for TransferAmounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: f64| bytes / f64::from(1 << 20);
        let sent = self.sent_bytes as f64;
        let expected = self.expected_bytes.max(self.sent_bytes) as f64;
        write!(f, "{:.0} of about {:.0} MiB", mib(sent), mib(expected))?;
        if self.rate > 0.0 {
            let remaining_s = (expected - sent) / self.rate;
            write!(
                f,
                ", {:.0} MiB/s, about {remaining_s:.0} s left",
                mib(self.rate)
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// A transfer has its amount, its rate and an estimate.
    #[test]
    fn transfer_is_estimated() {
        let start = Instant::now();
        let mut transfer = TransferAmounts::new(100 << 20, 1000 << 20, start);
        assert_eq!(transfer.to_string(), "100 of about 1000 MiB");
        transfer.update(500 << 20, start + Duration::from_secs(2));
        assert_eq!(
            transfer.to_string(),
            "500 of about 1000 MiB, 200 MiB/s, about 2 s left"
        );
        transfer.update(1100 << 20, start + Duration::from_secs(5));
        assert_eq!(
            transfer.to_string(),
            "1100 of about 1100 MiB, 200 MiB/s, about 0 s left"
        );
    }
}
