//! Names of trace events and of their data items, in the order that gives them their numbers. Programs that read traces
//! (console, tracer) take them from the library.

use std::ffi::CStr;

pub(crate) use libpvm::trace_events::EVENTS;

/// Short names of the data items of events; the number of an item is its position.
pub(crate) const DATA_IDS: [&CStr; 123] = [
    c"AN", c"AC", c"AS", c"BF", c"CC", c"CN", c"CI", c"CF", c"CD", c"CR", c"CL", c"CDA", c"CDT", c"CDX", c"CDC",
    c"CGI", c"CRF", c"CXC", c"CXF", c"CXN", c"CXS", c"ERI", c"ERR", c"FDS", c"FP", c"GN", c"GI", c"GT", c"GS", c"GBC",
    c"HN", c"HNL", c"HNA", c"HPT", c"HA", c"HSP", c"HIS", c"HCS", c"HCU", c"HDS", c"HDU", c"HS", c"INB", c"IMC",
    c"IST", c"MC", c"MCX", c"MB", c"MNB", c"SRC", c"DST", c"MDL", c"MTS", c"MTU", c"MRF", c"MRB", c"MSB", c"ME",
    c"MHI", c"AST", c"AMC", c"AML", c"NE", c"NMC", c"NCT", c"NTL", c"NH", c"NA", c"OPT", c"OPV", c"OS", c"PDA", c"PDT",
    c"PC", c"PSD", c"PSG", c"PF", c"PRF", c"RST", c"RMC", c"RCX", c"SN", c"SE", c"SF", c"SW", c"SC", c"STL", c"SIB",
    c"TID", c"PT", c"MT", c"TF", c"TN", c"PID", c"TT", c"TW", c"TIS", c"TNT", c"TST", c"TUS", c"TUU", c"TSS", c"TSU",
    c"TES", c"TA", c"TR", c"TS", c"TU", c"TGS", c"TGU", c"TMW", c"TM", c"TRC", c"TRT", c"TRX", c"TRO", c"TRM", c"TRB",
    c"TRL", c"VER", c"VCT", c"VID", c"WID",
];
