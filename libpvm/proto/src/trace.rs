//! Trace records of tasks and daemons, in the format that PVM's tracers read.
//!
//! A record consists of an event and a list of named items. The first record of each event that a
//! sender sends to a tracer contains the names and types of its items; later records contain only
//! values. Before all records, a tracer receives the table of item numbers and names.

use crate::body::Packer;
use std::ffi::CStr;

/// Markers before and after a group of buffered records.
pub const GROUP_MARKERS: [i32; 2] = [-1, -2];
/// Markers before and after the table of item names.
pub const ITEM_TABLE_MARKERS: [i32; 2] = [-3, -4];
/// Markers before and after a record with the names and types of its items.
pub const SELF_DESCRIBING_MARKERS: [i32; 2] = [-5, -6];
/// Markers before and after a record with values only.
pub const VALUES_MARKERS: [i32; 2] = [-7, -8];
/// Marker after a user-defined event.
pub const USER_EVENT_END_MARKER: i32 = -10;

/// Offset that is added to an event's number in the record that marks the start of a call.
pub const EVENT_ENTRY_OFFSET: i32 = 0x4000;
/// Offset that is added to an event's number in the record that marks the end of a call.
pub const EVENT_EXIT_OFFSET: i32 = 0x8000;

/// Number and name of the event of a task that has started or connected.
pub const NEW_TASK_EVENT: (i32, &str) = (75, "newtask");
/// Number and name of the event of a task that has ended.
pub const END_TASK_EVENT: (i32, &str) = (76, "endtask");
/// Number and name of the event of a daemon that was asked to start a task.
pub const SPAWN_TASK_EVENT: (i32, &str) = (77, "spntask");

/// Type flag of an item that is a list.
const LIST_FLAG: i32 = 0x80;
const TYPE_INT: i32 = 6;
const TYPE_LONG: i32 = 8;
const TYPE_TEXT: i32 = 12;

/// Short names of record items. The number of an item is its index in this list.
pub const ITEM_NAMES: [&CStr; 123] = [
    c"AN", c"AC", c"AS", c"BF", c"CC", c"CN", c"CI", c"CF", c"CD", c"CR", c"CL", c"CDA", c"CDT",
    c"CDX", c"CDC", c"CGI", c"CRF", c"CXC", c"CXF", c"CXN", c"CXS", c"ERI", c"ERR", c"FDS", c"FP",
    c"GN", c"GI", c"GT", c"GS", c"GBC", c"HN", c"HNL", c"HNA", c"HPT", c"HA", c"HSP", c"HIS",
    c"HCS", c"HCU", c"HDS", c"HDU", c"HS", c"INB", c"IMC", c"IST", c"MC", c"MCX", c"MB", c"MNB",
    c"SRC", c"DST", c"MDL", c"MTS", c"MTU", c"MRF", c"MRB", c"MSB", c"ME", c"MHI", c"AST", c"AMC",
    c"AML", c"NE", c"NMC", c"NCT", c"NTL", c"NH", c"NA", c"OPT", c"OPV", c"OS", c"PDA", c"PDT",
    c"PC", c"PSD", c"PSG", c"PF", c"PRF", c"RST", c"RMC", c"RCX", c"SN", c"SE", c"SF", c"SW",
    c"SC", c"STL", c"SIB", c"TID", c"PT", c"MT", c"TF", c"TN", c"PID", c"TT", c"TW", c"TIS",
    c"TNT", c"TST", c"TUS", c"TUU", c"TSS", c"TSU", c"TES", c"TA", c"TR", c"TS", c"TU", c"TGS",
    c"TGU", c"TMW", c"TM", c"TRC", c"TRT", c"TRX", c"TRO", c"TRM", c"TRB", c"TRL", c"VER", c"VCT",
    c"VID", c"WID",
];

/// Returns the number of the item with this name.
///
/// # Panics
/// The name is unknown; names are constants of the program.
pub fn item_number(name: &str) -> i32 {
    let index = ITEM_NAMES
        .iter()
        .position(|item_name| item_name.to_bytes() == name.as_bytes());
    index.unwrap_or_else(|| panic!("{name} is not a trace record item")) as i32
}

/// True if `mask`, encoded as in `PVMTMASK`, selects the event with this number.
pub fn mask_selects(mask: &[u8], event: i32) -> bool {
    let mask_byte = usize::try_from(event / 4)
        .ok()
        .and_then(|byte_index| mask.get(byte_index));
    mask_byte.is_some_and(|byte| byte & 1 << (event & 3) != 0)
}

/// The value of a record's item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TraceValue {
    Int(i32),
    /// An address or another 64-bit number.
    Long(i64),
    Text(Vec<u8>),
    Ints(Vec<i32>),
    Texts(Vec<Vec<u8>>),
}

/// One named value of a trace record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceItem {
    /// Must be one of [`ITEM_NAMES`].
    pub name: &'static str,
    pub value: TraceValue,
}

pub fn int_item(name: &'static str, value: i32) -> TraceItem {
    TraceItem {
        name,
        value: TraceValue::Int(value),
    }
}

pub fn text_item(name: &'static str, value: impl Into<Vec<u8>>) -> TraceItem {
    TraceItem {
        name,
        value: TraceValue::Text(value.into()),
    }
}

pub fn ints_item(name: &'static str, value: Vec<i32>) -> TraceItem {
    TraceItem {
        name,
        value: TraceValue::Ints(value),
    }
}

/// Returns the items with which every record begins: the time (in seconds and microseconds) and the
/// tid.
pub fn record_head_items(seconds: i32, micros: i32, tid: i32) -> Vec<TraceItem> {
    vec![
        int_item("TS", seconds),
        int_item("TU", micros),
        int_item("TID", tid),
    ]
}

/// Packs the table of item numbers and names, which a tracer receives before all records.
pub fn pack_item_table(out: &mut Packer) {
    out.pack_int(ITEM_TABLE_MARKERS[0]);
    for (number, name) in ITEM_NAMES.iter().enumerate() {
        out.pack_int(number as i32)
            .pack_str(name.to_bytes())
            .pack_str(name.to_bytes());
    }
    out.pack_int(ITEM_TABLE_MARKERS[1]);
}

/// Packs a record. If `event_name` is set, the record contains this event name and the names and
/// types of its items.
pub fn pack_record(out: &mut Packer, event: i32, event_name: Option<&str>, items: &[TraceItem]) {
    let [begin, end] = if event_name.is_some() {
        SELF_DESCRIBING_MARKERS
    } else {
        VALUES_MARKERS
    };
    out.pack_int(begin).pack_int(event);
    if let Some(event_name) = event_name {
        out.pack_str(event_name.as_bytes());
    }
    for item in items {
        if event_name.is_some() {
            let item_type = match &item.value {
                TraceValue::Int(_) => TYPE_INT,
                TraceValue::Long(_) => TYPE_LONG,
                TraceValue::Text(_) => TYPE_TEXT,
                TraceValue::Ints(_) => TYPE_INT | LIST_FLAG,
                TraceValue::Texts(_) => TYPE_TEXT | LIST_FLAG,
            };
            out.pack_int(item_number(item.name)).pack_int(item_type);
        }
        match &item.value {
            TraceValue::Int(value) => out.pack_int(*value),
            TraceValue::Long(value) => out.pack_items([*value]),
            TraceValue::Text(value) => out.pack_str(value),
            TraceValue::Ints(values) => out
                .pack_int(values.len() as i32)
                .pack_items(values.iter().copied()),
            TraceValue::Texts(values) => out.pack_strs(values),
        };
    }
    out.pack_int(end);
}

/// Packs buffered records, already encoded, between the group markers.
pub fn pack_group(out: &mut Packer, records: &[u8]) {
    out.pack_int(GROUP_MARKERS[0])
        .append_encoded(records)
        .pack_int(GROUP_MARKERS[1]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::{Encoding, Unpacker};

    #[test]
    fn record_describes_itself_only_with_a_name() {
        let mut items = record_head_items(1, 2, 0x40001);
        items.extend([
            int_item("CC", -2),
            ints_item("STL", vec![7]),
            text_item("SW", "h2"),
        ]);
        let mut out = Packer::new(Encoding::Xdr);
        pack_record(&mut out, 52 | EVENT_EXIT_OFFSET, Some("spawn"), &items);
        pack_record(&mut out, 52 | EVENT_EXIT_OFFSET, None, &items);
        let mut unpacker = Unpacker::new_xdr(out.finish());
        let mut next_int = || unpacker.read_int().expect("an int");
        assert_eq!([next_int(), next_int()], [-5, 0x8034]);
        assert_eq!(unpacker.read_string().as_deref(), Ok("spawn"));
        let mut next_int = || unpacker.read_int().expect("an int");
        assert_eq!([next_int(), next_int(), next_int()], [106, 6, 1]);
        assert_eq!(
            [
                next_int(),
                next_int(),
                next_int(),
                next_int(),
                next_int(),
                next_int()
            ],
            [107, 6, 2, 88, 6, 0x40001]
        );
        assert_eq!(
            [
                next_int(),
                next_int(),
                next_int(),
                next_int(),
                next_int(),
                next_int(),
                next_int()
            ],
            [4, 6, -2, 86, 134, 1, 7]
        );
        assert_eq!([next_int(), next_int()], [84, 12]);
        assert_eq!(unpacker.read_string().as_deref(), Ok("h2"));
        let mut next_int = || unpacker.read_int().expect("an int");
        assert_eq!(
            [next_int(), next_int(), next_int(), next_int()],
            [-6, -7, 0x8034, 1]
        );
        assert_eq!(
            [next_int(), next_int(), next_int(), next_int(), next_int()],
            [2, 0x40001, -2, 1, 7]
        );
        assert_eq!(unpacker.read_string().as_deref(), Ok("h2"));
        assert_eq!((unpacker.read_int(), unpacker.remaining()), (Ok(-8), 0));
    }

    #[test]
    fn item_numbers_match_pvm() {
        for (name, number) in [
            ("AN", 0),
            ("CC", 4),
            ("TS", 106),
            ("TU", 107),
            ("TID", 88),
            ("WID", 122),
        ] {
            assert_eq!(item_number(name), number);
        }
        assert!(
            mask_selects(b"@A", 4)
                && !mask_selects(b"@A", 5)
                && !mask_selects(b"@A", 400)
                && !mask_selects(b"", -1)
        );
    }
}
