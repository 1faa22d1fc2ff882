//! Names of trace events and of their data items, in the order that gives them their numbers. Programs that read traces
//! (console, tracer) take them from the library.

pub(crate) use libpvm::trace_events::EVENTS;
pub(crate) use sempa_proto::trace::DATA_IDS;
