//! Parts of the JSON values that commands print with `--json`, one value per line.
//!
//! Tids are written as `t40001`, and times in microseconds since the Unix epoch.

use sempa_proto::PvmError;
use sempa_proto::table::HostEntry;
use serde_json::{Value, json};

/// Returns the code and the text of an error as a JSON object.
pub(crate) fn error(error: PvmError) -> Value {
    json!({ "code": error.code(), "text": error.text() })
}

pub(crate) fn host(entry: &HostEntry) -> Value {
    json!({
        "name": entry.name,
        "index": entry.id.index(),
        "dtid": entry.id.tid().to_string(),
        "arch": entry.arch,
        "speed": entry.speed,
        "dsig": entry.dsig,
        "addresses": entry.addresses,
    })
}

/// Combines the JSON values of all requested items into one value.
pub(crate) fn results(values: Vec<Value>) -> Value {
    json!({ "results": values })
}
