//! Names of trace events and of their data items. The position of a name is the number of the event
//! or item.
//!
//! The tables are defined in `libpvm` and `sempa_proto`, because programs that read traces
//! (console, tracer) use them as well.

pub(crate) use libpvm::trace_events::EVENT_NAMES;
pub(crate) use sempa_proto::trace::ITEM_NAMES;
