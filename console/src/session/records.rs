//! Converts trace records of tasks and daemons to text, in the self-describing format (SDDF) that
//! PVM's console prints. Pure.
//!
//! A message contains a sequence of records. A task sends the description of an event with the
//! event's first record. The text contains the description before the first record of each event in
//! a job.

use sempa_proto::body::Unpacker;
use sempa_proto::trace::{
    EVENT_ENTRY_OFFSET, EVENT_EXIT_OFFSET, GROUP_MARKERS, ITEM_NAMES, ITEM_TABLE_MARKERS,
    SELF_DESCRIBING_MARKERS, USER_EVENT_END_MARKER, VALUES_MARKERS,
};
use sempa_proto::{PvmError, PvmResult, Tid};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Marks the start of a program's own event; [`USER_EVENT_END_MARKER`] marks its end.
const USER_EVENT_BEGIN: i32 = -9;
/// Bit set in the type of an array.
const ARRAY_BIT: i32 = 0x80;
/// Maximum number of event descriptions, and of item names, per job.
const DESCRIPTIONS_MAX: usize = 4096;
/// Event numbers of the records that the console itself makes.
const HOST_ADD_EVENT: i32 = 401;
const OUTPUT_EVENT: i32 = 404;
/// Short and long name of the items at the beginning of every record: seconds, microseconds, task.
const COMMON_ITEMS: [(&str, &str); 3] = [
    ("TS", "Time Seconds"),
    ("TU", "Time Microseconds"),
    ("TID", "Task ID"),
];

/// Description of one item of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ItemDescription {
    short: String,
    long: String,
    type_code: i32,
}

/// Description of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
struct EventDescription {
    name: String,
    items: Vec<ItemDescription>,
}

/// Converts the records of one job.
#[derive(Debug, Default)]
pub(crate) struct RecordPrinter {
    item_names: BTreeMap<i32, (String, String)>,
    descriptions: BTreeMap<i32, EventDescription>,
    /// Numbers of the events whose description was printed.
    printed: BTreeMap<i32, ()>,
}

impl RecordPrinter {
    /// Appends the text of a message to `out`, as lines with newlines.
    ///
    /// # Errors
    /// Fails if the message is truncated or malformed. The text of the records before the error is
    /// in `out`.
    pub(crate) fn read(&mut self, body: &mut Unpacker, out: &mut String) -> PvmResult<()> {
        while body.remaining() > 0 {
            match body.int()? {
                marker if GROUP_MARKERS.contains(&marker) => {}
                marker if marker == ITEM_TABLE_MARKERS[0] => self.read_item_names(body)?,
                marker if marker == SELF_DESCRIBING_MARKERS[0] => {
                    self.read_described_record(body, out)?
                }
                marker if marker == VALUES_MARKERS[0] => self.read_record(body, out)?,
                USER_EVENT_BEGIN => self.read_user_event(body, out)?,
                _ => return Err(PvmError::BadMsg),
            }
        }
        Ok(())
    }

    fn read_item_names(&mut self, body: &mut Unpacker) -> PvmResult<()> {
        loop {
            let id = body.int()?;
            if id == ITEM_TABLE_MARKERS[1] {
                return Ok(());
            }
            let names = (body.string()?, body.string()?);
            if self.item_names.len() < DESCRIPTIONS_MAX {
                self.item_names.insert(id, names);
            }
        }
    }

    fn read_described_record(&mut self, body: &mut Unpacker, out: &mut String) -> PvmResult<()> {
        let id = body.int()?;
        let mut kind = EventDescription {
            name: body.string()?,
            items: Vec::new(),
        };
        let mut values = Vec::new();
        loop {
            let item = body.int()?;
            if item == SELF_DESCRIBING_MARKERS[1] {
                break;
            }
            let number = body.int()?;
            values.push(read_value(body, number)?);
            kind.items.push(self.describe_item(item, number));
        }
        if self.descriptions.len() < DESCRIPTIONS_MAX {
            self.descriptions.insert(id, kind.clone());
        }
        self.print(&with_suffix(&kind, id), record_number(id), &values, out);
        Ok(())
    }

    fn describe_item(&self, id: i32, kind: i32) -> ItemDescription {
        let (short, long) = self
            .item_names
            .get(&id)
            .cloned()
            .unwrap_or_else(|| default_names(id));
        ItemDescription {
            short,
            long,
            type_code: kind,
        }
    }

    fn read_record(&mut self, body: &mut Unpacker, out: &mut String) -> PvmResult<()> {
        let id = body.int()?;
        let kind = self
            .descriptions
            .get(&id)
            .cloned()
            .ok_or(PvmError::BadMsg)?;
        let values = kind
            .items
            .iter()
            .map(|item| read_value(body, item.type_code))
            .collect::<PvmResult<Vec<_>>>()?;
        if body.int()? != VALUES_MARKERS[1] {
            return Err(PvmError::BadMsg);
        }
        self.print(&with_suffix(&kind, id), record_number(id), &values, out);
        Ok(())
    }

    fn read_user_event(&mut self, body: &mut Unpacker, out: &mut String) -> PvmResult<()> {
        let id = body.int()?;
        let name = body.string()?;
        let mut kind = EventDescription {
            name,
            items: COMMON_ITEMS[..2]
                .iter()
                .map(|(short, long)| int_item(short, long))
                .collect(),
        };
        let mut values = vec![body.int()?.to_string(), body.int()?.to_string()];
        loop {
            let number = body.int()?;
            if number == USER_EVENT_END_MARKER {
                break;
            }
            values.push(read_value(body, number)?);
            kind.items.push(ItemDescription {
                short: format!("D{}", values.len() - 2),
                long: String::new(),
                type_code: number,
            });
        }
        // Each event of a program may have other items, so the description is printed each time.
        self.printed.remove(&record_number(id));
        self.print(&with_suffix(&kind, id), record_number(id), &values, out);
        Ok(())
    }

    fn print(&mut self, kind: &EventDescription, number: i32, values: &[String], out: &mut String) {
        if self.printed.insert(number, ()).is_none() {
            append(out, format_args!("\n#{number}: \"{}\"\n{{\n", kind.name));
            for ItemDescription {
                short,
                long,
                type_code,
            } in &kind.items
            {
                append(
                    out,
                    format_args!(
                        "\t// \"{short}\" \"{long}\"\n\t{} \"{short}\"{};\n",
                        type_name(*type_code),
                        type_brackets(*type_code)
                    ),
                );
            }
            out.push_str("};;\n\n");
        }
        append(
            out,
            format_args!("\"{}\" {{ {} }};;\n", kind.name, values.join(", ")),
        );
    }

    /// Returns a record that the console makes for a line of output, or for an event of a task's
    /// output.
    pub(crate) fn output_record(&mut self, at: Timestamp, tid: Tid, text: &str) -> String {
        let mut kind = EventDescription {
            name: "output(0)".into(),
            items: common_items(),
        };
        kind.items.push(ItemDescription {
            short: "OS".into(),
            long: "Output String".into(),
            type_code: STRING,
        });
        let mut out = String::new();
        self.print(
            &kind,
            1000 + 2 * OUTPUT_EVENT,
            &[at.values(tid), sized_string(text.as_bytes())],
            &mut out,
        );
        out
    }

    /// Returns a record that the console makes for a host of the virtual machine.
    pub(crate) fn host_record(&mut self, at: Timestamp, host: &HostProperties<'_>) -> String {
        let mut kind = EventDescription {
            name: "host_add(0)".into(),
            items: common_items(),
        };
        for (short, long, number) in [
            ("HN", "Host Name", STRING),
            ("HNA", "Host Name Alias", STRING),
            ("HA", "Host Architecture", STRING),
            ("HSP", "Host Speed", INT),
        ] {
            kind.items.push(ItemDescription {
                short: short.into(),
                long: long.into(),
                type_code: number,
            });
        }
        let alias = host.name.split('.').next().unwrap_or(host.name);
        let names = [host.name, alias, host.arch].map(|name| sized_string(name.as_bytes()));
        let mut values = vec![at.values(host.tid)];
        values.extend(names);
        values.push(host.speed.to_string());
        let mut out = String::new();
        self.print(&kind, 1000 + 2 * HOST_ADD_EVENT, &values, &mut out);
        out
    }
}

/// Returns short and long name of an item whose names are unknown. A task sends names once,
/// possibly to an earlier job.
fn default_names(id: i32) -> (String, String) {
    let short = usize::try_from(id)
        .ok()
        .and_then(|at| ITEM_NAMES.get(at))
        .and_then(|name| name.to_str().ok());
    short.map_or_else(
        || (id.to_string(), String::new()),
        |short| (short.to_string(), short.to_string()),
    )
}

/// Time since the Unix epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Timestamp {
    pub(crate) seconds: u64,
    /// Microseconds of the current second.
    pub(crate) micros: u32,
}

impl Timestamp {
    fn values(self, tid: Tid) -> String {
        format!("{}, {}, {}", self.seconds, self.micros, tid.raw())
    }
}

/// Properties of a host that its trace record contains.
pub(crate) struct HostProperties<'a> {
    pub(crate) tid: Tid,
    pub(crate) name: &'a str,
    pub(crate) arch: &'a str,
    pub(crate) speed: i32,
}

/// Returns the header of a job's trace.
pub(crate) fn preamble(date: &str) -> String {
    format!(
        "/*\n * \"Creation Date\" \"{date}\"\n * \"Machine\" \"Console 3.4.6 (PVM 3.4.6)\"\n */ ;;\n\n"
    )
}

fn append(out: &mut String, text: std::fmt::Arguments<'_>) {
    out.write_fmt(text).expect("a string takes everything");
}

fn int_item(short: &str, long: &str) -> ItemDescription {
    ItemDescription {
        short: short.into(),
        long: long.into(),
        type_code: INT,
    }
}

fn common_items() -> Vec<ItemDescription> {
    COMMON_ITEMS
        .iter()
        .map(|(short, long)| int_item(short, long))
        .collect()
}

/// Returns the description with the name that records have: the event's name with a suffix for
/// entry or exit.
fn with_suffix(kind: &EventDescription, id: i32) -> EventDescription {
    let suffix = match id & (EVENT_ENTRY_OFFSET | EVENT_EXIT_OFFSET) {
        EVENT_ENTRY_OFFSET => "(0.0)",
        EVENT_EXIT_OFFSET => "(1.1)",
        _ => "(0)",
    };
    EventDescription {
        name: format!("{}{suffix}", kind.name),
        items: kind.items.clone(),
    }
}

/// Returns the number by which the text identifies the records of an event.
fn record_number(id: i32) -> i32 {
    let event = (id & !(EVENT_ENTRY_OFFSET | EVENT_EXIT_OFFSET)).rem_euclid(EVENT_ENTRY_OFFSET);
    if id & EVENT_EXIT_OFFSET != 0 {
        2001 + 2 * event
    } else {
        1000 + 2 * event
    }
}

const BYTE: i32 = 1;
const CPLX: i32 = 2;
const DCPLX: i32 = 3;
const DOUBLE: i32 = 4;
const FLOAT: i32 = 5;
const INT: i32 = 6;
const STRING: i32 = 12;

/// Returns the name by which the text identifies a type.
fn type_name(kind: i32) -> &'static str {
    match kind & !ARRAY_BIT {
        BYTE | STRING => "char",
        CPLX | FLOAT => "float",
        DCPLX | DOUBLE => "double",
        _ => "int",
    }
}

fn type_brackets(kind: i32) -> &'static str {
    match (kind & !ARRAY_BIT == STRING, kind & ARRAY_BIT != 0) {
        (true, true) => "[][]",
        (true, false) | (false, true) => "[]",
        (false, false) => "",
    }
}

fn sized_string(text: &[u8]) -> String {
    format!("[{}] {{ {} }}", text.len() + 1, quoted(text))
}

fn quoted(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

/// Reads one value of a type and returns it as text.
fn read_value(body: &mut Unpacker, kind: i32) -> PvmResult<String> {
    if kind & ARRAY_BIT == 0 {
        return if kind == STRING {
            Ok(sized_string(&body.str()?))
        } else {
            read_scalar(body, kind)
        };
    }
    let count = usize::try_from(body.int()?).map_err(|_| PvmError::BadMsg)?;
    // Every item has at least one byte, so a count above the remaining bytes is invalid.
    if count > body.remaining() {
        return Err(PvmError::NoData);
    }
    let kind = kind & !ARRAY_BIT;
    if kind == BYTE {
        return Ok(sized_string(&body.bytes(count)?));
    }
    if kind == STRING {
        let texts = (0..count)
            .map(|_| body.str())
            .collect::<PvmResult<Vec<_>>>()?;
        let longest = texts.iter().map(|text| text.len() + 1).max().unwrap_or(0);
        let list: Vec<String> = texts.iter().map(|text| quoted(text)).collect();
        return Ok(format!("[{count}] [{longest}] {{ {} }}", list.join(", ")));
    }
    let list = (0..count)
        .map(|_| read_scalar(body, kind))
        .collect::<PvmResult<Vec<_>>>()?;
    Ok(format!("[{count}] {{ {} }}", list.join(", ")))
}

fn read_scalar(body: &mut Unpacker, kind: i32) -> PvmResult<String> {
    Ok(match kind {
        BYTE => body.bytes(1)?[0].to_string(),
        CPLX => format!("{}, {}", body.item::<f32>()?, body.item::<f32>()?),
        DCPLX => format!("{}, {}", body.item::<f64>()?, body.item::<f64>()?),
        DOUBLE => body.item::<f64>()?.to_string(),
        FLOAT => body.item::<f32>()?.to_string(),
        INT => body.int()?.to_string(),
        7 => body.item::<u32>()?.to_string(),
        8 => body.item::<i64>()?.to_string(),
        9 => body.item::<u64>()?.to_string(),
        10 => body.item::<i16>()?.to_string(),
        11 => body.item::<u16>()?.to_string(),
        _ => return Err(PvmError::BadMsg),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::body::{Encoding, Packer};

    const AT: Timestamp = Timestamp {
        seconds: 1_795_262_880,
        micros: 720_903,
    };

    /// Writes the table of item names and one record of `spawn`, as a task sends them.
    fn spawn_exit(out: &mut Packer) {
        out.int(-3);
        for (id, short, long) in [
            (10, "TS", "Time Seconds"),
            (11, "CC", "Condition Code"),
            (12, "STL", "Tids"),
        ] {
            out.int(id).str(short.as_bytes()).str(long.as_bytes());
        }
        out.int(-4);
        out.items([-5, 52 | EVENT_EXIT_OFFSET])
            .str(b"spawn")
            .items([10, INT, 5, 11, INT, 1, 12, INT | ARRAY_BIT, 1, 262_147, -6]);
    }

    fn read(records: &mut RecordPrinter, packer: Packer) -> (String, PvmResult<()>) {
        let mut out = String::new();
        let result = records.read(&mut Unpacker::xdr(packer.finish()), &mut out);
        (out, result)
    }

    /// An event is described before its first record and not again.
    #[test]
    fn event_is_described_once() {
        let mut records = RecordPrinter::default();
        let mut body = Packer::new(Encoding::Xdr);
        spawn_exit(&mut body);
        let (text, result) = read(&mut records, body);
        assert_eq!(result, Ok(()));
        assert_eq!(
            text,
            "\n#2105: \"spawn(1.1)\"\n{\n\t// \"TS\" \"Time Seconds\"\n\tint \"TS\";\n\t// \"CC\" \"Condition Code\"\n\
             \tint \"CC\";\n\t// \"STL\" \"Tids\"\n\tint \"STL\"[];\n};;\n\n\"spawn(1.1)\" { 5, 1, [1] { 262147 } };;\n"
        );
        let mut body = Packer::new(Encoding::Xdr);
        body.items([-1, -7, 52 | EVENT_EXIT_OFFSET, 6, 0, 0, -8, -2]);
        assert_eq!(
            read(&mut records, body),
            ("\"spawn(1.1)\" { 6, 0, [0] {  } };;\n".into(), Ok(()))
        );
        let mut again = Packer::new(Encoding::Xdr);
        spawn_exit(&mut again);
        assert_eq!(
            read(&mut records, again).0,
            "\"spawn(1.1)\" { 5, 1, [1] { 262147 } };;\n"
        );
    }

    /// Strings and lists of strings are printed with their lengths.
    #[test]
    fn strings_are_printed_with_lengths() {
        let mut records = RecordPrinter::default();
        let mut body = Packer::new(Encoding::Xdr);
        body.items([-5, 106])
            .str(b"timing")
            .items([999, STRING | ARRAY_BIT, 2])
            .str(b"exit")
            .str(b"mhf_invoke");
        body.items([2, STRING]).str(b"a\"b").int(-6);
        let (text, result) = read(&mut records, body);
        assert_eq!(result, Ok(()));
        assert!(
            text.starts_with("\n#1212: \"timing(0)\"\n{\n\t// \"999\" \"\"\n\tchar \"999\"[][];\n"),
            "{text}"
        );
        assert!(text.ends_with(
            "\"timing(0)\" { [2] [11] { \"exit\", \"mhf_invoke\" }, [4] { \"a\\\"b\" } };;\n"
        ));
    }

    /// The console makes records for hosts and output.
    #[test]
    fn console_makes_host_and_output_records() {
        let mut records = RecordPrinter::default();
        let tid = Tid::from_raw(262_146);
        assert!(
            records
                .output_record(AT, tid, "CREATION")
                .starts_with("\n#1808: \"output(0)\"\n{\n\t// \"TS\" \"Time Seconds\"")
        );
        let second = records.output_record(AT, tid, "i'm t40002");
        assert_eq!(
            second,
            "\"output(0)\" { 1795262880, 720903, 262146, [11] { \"i'm t40002\" } };;\n"
        );
        let host = HostProperties {
            tid: Tid::from_raw(262_144),
            name: "vm.lab",
            arch: "LINUX64",
            speed: 1000,
        };
        let text = records.host_record(AT, &host);
        assert!(text.starts_with("\n#1802: \"host_add(0)\"\n"));
        assert!(text.ends_with(
            "\"host_add(0)\" { 1795262880, 720903, 262144, [7] { \"vm.lab\" }, [3] { \"vm\" }, [8] { \"LINUX64\" }, 1000 };;\n"
        ));
    }

    /// Events of programs describe their items.
    #[test]
    fn user_events_describe_their_items() {
        let mut records = RecordPrinter::default();
        let mut body = Packer::new(Encoding::Xdr);
        body.items([-9, 108])
            .str(b"step")
            .items([7, 8])
            .items([INT | ARRAY_BIT, 2, 1, 2, DOUBLE])
            .items([0.5f64])
            .int(-10);
        let (text, result) = read(&mut records, body);
        assert_eq!(result, Ok(()));
        assert!(
            text.contains("#1216: \"step(0)\"") && text.contains("double \"D2\";"),
            "{text}"
        );
        assert!(
            text.ends_with("\"step(0)\" { 7, 8, [2] { 1, 2 }, 0.5 };;\n"),
            "{text}"
        );
    }

    /// Malformed records cause errors and no panic.
    #[test]
    fn malformed_records_are_errors() {
        for words in [
            vec![-7, 52],
            vec![5],
            vec![-5],
            vec![-5, 1],
            vec![-3, 1],
            vec![-9, 1, -1],
            vec![-5, 3, 2, 0, 4, 0x86, -5],
        ] {
            let mut body = Packer::new(Encoding::Xdr);
            body.items(words.clone());
            assert!(
                read(&mut RecordPrinter::default(), body).1.is_err(),
                "{words:?}"
            );
        }
        let mut body = Packer::new(Encoding::Xdr);
        body.items([-5, 1])
            .str(b"x")
            .items([1, INT | ARRAY_BIT, i32::MAX]);
        assert_eq!(
            read(&mut RecordPrinter::default(), body).1,
            Err(PvmError::NoData)
        );
    }
}
