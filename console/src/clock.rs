//! Wall-clock time, in the unit of event times.

use sempa_proto::Micros;
use std::time::{SystemTime, UNIX_EPOCH};

/// Returns the microseconds since the Unix epoch.
pub(crate) fn unix_micros() -> Micros {
    let since_epoch = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    Micros(u64::try_from(since_epoch.as_micros()).unwrap_or(u64::MAX))
}
