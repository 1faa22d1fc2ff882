//! The time of day.

use sempa_proto::Micros;
use std::time::{SystemTime, UNIX_EPOCH};

/// Microseconds since 1970.
pub(crate) fn micros_now() -> Micros {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    Micros(u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
}
