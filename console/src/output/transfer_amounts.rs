//! Amount, rate and estimated end of a transfer that is under way.

use std::fmt;
use std::time::Instant;

/// Amounts of a transfer that is under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TransferAmounts {
    sent_bytes: u64,
    /// Resident memory when the transfer was first seen. The images have about this size.
    expected_bytes: u64,
    /// Bytes per second since the transfer was first seen.
    rate: f64,
    first_seen: (Instant, u64),
}

impl TransferAmounts {
    pub(crate) fn new(sent_bytes: u64, expected_bytes: u64, now: Instant) -> Self {
        Self {
            sent_bytes,
            expected_bytes,
            rate: 0.0,
            first_seen: (now, sent_bytes),
        }
    }

    pub(crate) fn update(&mut self, sent_bytes: u64, now: Instant) {
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
