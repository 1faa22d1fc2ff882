//! Names of trace events and of their data items. The position of a name is the number of the event
//! or item.
//!
//! The tables are defined in `libpvm` and `sempa_proto`, which programs that read traces (console,
//! tracer) use as well.

pub(crate) use libpvm::trace_events::EVENT_NAMES;
pub(crate) use sempa_proto::trace::ITEM_NAMES;
