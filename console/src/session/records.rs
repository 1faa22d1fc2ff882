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

/// Marks the start of an event that a program defines; [`USER_EVENT_END_MARKER`] marks its end.
const USER_EVENT_BEGIN_MARKER: i32 = -9;
/// Bit set in the type of an array.
const ARRAY_BIT: i32 = 0x80;
/// Maximum number of event descriptions, and of item names, per job.
const DESCRIPTIONS_MAX: usize = 4096;
/// Event number of the console's record about a host.
const HOST_ADD_EVENT: i32 = 401;
/// Event number of the console's record about a line of output, or about an event of a task's
/// output.
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
    short_name: String,
    long_name: String,
    type_code: i32,
}

/// Description of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
struct EventDescription {
    name: String,
    items: Vec<ItemDescription>,
}

/// Converts the trace records of one job to text.
#[derive(Debug, Default)]
pub(crate) struct RecordFormatter {
    item_names: BTreeMap<i32, (String, String)>,
    descriptions: BTreeMap<i32, EventDescription>,
    /// Numbers of the events whose description has been printed.
    described_events: BTreeMap<i32, ()>,
}

impl RecordFormatter {
    /// Appends the text of a message to `out`, as lines with newlines.
    ///
    /// # Errors
    /// Fails if the message is truncated or malformed. The text of the records before the error is
    /// in `out`.
    pub(crate) fn append_message(
        &mut self,
        body: &mut Unpacker,
        out: &mut String,
    ) -> PvmResult<()> {
        while body.remaining() > 0 {
            match body.read_int()? {
                marker if GROUP_MARKERS.contains(&marker) => {}
                marker if marker == ITEM_TABLE_MARKERS[0] => self.read_item_names(body)?,
                marker if marker == SELF_DESCRIBING_MARKERS[0] => {
                    self.read_described_record(body, out)?
                }
                marker if marker == VALUES_MARKERS[0] => self.read_record(body, out)?,
                USER_EVENT_BEGIN_MARKER => self.read_user_event(body, out)?,
                _ => return Err(PvmError::BadMsg),
            }
        }
        Ok(())
    }

    fn read_item_names(&mut self, body: &mut Unpacker) -> PvmResult<()> {
        loop {
            let id = body.read_int()?;
            if id == ITEM_TABLE_MARKERS[1] {
                return Ok(());
            }
            let names = (body.read_string()?, body.read_string()?);
            if self.item_names.len() < DESCRIPTIONS_MAX {
                self.item_names.insert(id, names);
            }
        }
    }

    fn read_described_record(&mut self, body: &mut Unpacker, out: &mut String) -> PvmResult<()> {
        let id = body.read_int()?;
        let mut description = EventDescription {
            name: body.read_string()?,
            items: Vec::new(),
        };
        let mut values = Vec::new();
        loop {
            let item_id = body.read_int()?;
            if item_id == SELF_DESCRIBING_MARKERS[1] {
                break;
            }
            let item_type = body.read_int()?;
            values.push(read_value(body, item_type)?);
            description
                .items
                .push(self.describe_item(item_id, item_type));
        }
        if self.descriptions.len() < DESCRIPTIONS_MAX {
            self.descriptions.insert(id, description.clone());
        }
        self.append_record(
            &with_call_suffix(&description, id),
            record_number(id),
            &values,
            out,
        );
        Ok(())
    }

    fn describe_item(&self, id: i32, item_type: i32) -> ItemDescription {
        let (short_item_name, long_item_name) = self
            .item_names
            .get(&id)
            .cloned()
            .unwrap_or_else(|| default_names(id));
        ItemDescription {
            short_name: short_item_name,
            long_name: long_item_name,
            type_code: item_type,
        }
    }

    fn read_record(&mut self, body: &mut Unpacker, out: &mut String) -> PvmResult<()> {
        let id = body.read_int()?;
        let description = self
            .descriptions
            .get(&id)
            .cloned()
            .ok_or(PvmError::BadMsg)?;
        let values = description
            .items
            .iter()
            .map(|item| read_value(body, item.type_code))
            .collect::<PvmResult<Vec<_>>>()?;
        if body.read_int()? != VALUES_MARKERS[1] {
            return Err(PvmError::BadMsg);
        }
        self.append_record(
            &with_call_suffix(&description, id),
            record_number(id),
            &values,
            out,
        );
        Ok(())
    }

    fn read_user_event(&mut self, body: &mut Unpacker, out: &mut String) -> PvmResult<()> {
        let id = body.read_int()?;
        let name = body.read_string()?;
        let mut description = EventDescription {
            name,
            items: COMMON_ITEMS[..2]
                .iter()
                .map(|(short_item_name, long_item_name)| int_item(short_item_name, long_item_name))
                .collect(),
        };
        let mut values = vec![body.read_int()?.to_string(), body.read_int()?.to_string()];
        loop {
            let item_type = body.read_int()?;
            if item_type == USER_EVENT_END_MARKER {
                break;
            }
            values.push(read_value(body, item_type)?);
            description.items.push(ItemDescription {
                short_name: format!("D{}", values.len() - 2),
                long_name: String::new(),
                type_code: item_type,
            });
        }
        // Each event of a program may have other items, so the description is printed each time.
        self.described_events.remove(&record_number(id));
        self.append_record(
            &with_call_suffix(&description, id),
            record_number(id),
            &values,
            out,
        );
        Ok(())
    }

    fn append_record(
        &mut self,
        description: &EventDescription,
        event_number: i32,
        values: &[String],
        out: &mut String,
    ) {
        if self.described_events.insert(event_number, ()).is_none() {
            append_format(
                out,
                format_args!("\n#{event_number}: \"{}\"\n{{\n", description.name),
            );
            for ItemDescription {
                short_name: short_item_name,
                long_name: long_item_name,
                type_code,
            } in &description.items
            {
                append_format(
                    out,
                    format_args!(
                        "\t// \"{short_item_name}\" \"{long_item_name}\"\n\t{} \"{short_item_name}\"{};\n",
                        type_name(*type_code),
                        type_brackets(*type_code)
                    ),
                );
            }
            out.push_str("};;\n\n");
        }
        append_format(
            out,
            format_args!("\"{}\" {{ {} }};;\n", description.name, values.join(", ")),
        );
    }

    /// Returns the text of the console's record about a line of output, or about an event of a
    /// task's output.
    pub(crate) fn output_record(&mut self, at: Timestamp, tid: Tid, text: &str) -> String {
        let mut description = EventDescription {
            name: "output(0)".into(),
            items: common_items(),
        };
        description.items.push(ItemDescription {
            short_name: "OS".into(),
            long_name: "Output String".into(),
            type_code: STRING_TYPE,
        });
        let mut out = String::new();
        self.append_record(
            &description,
            1000 + 2 * OUTPUT_EVENT,
            &[at.common_values(tid), sized_string(text.as_bytes())],
            &mut out,
        );
        out
    }

    /// Returns the text of the console's record about a host of the virtual machine.
    pub(crate) fn host_record(&mut self, at: Timestamp, host: &HostProperties<'_>) -> String {
        let mut description = EventDescription {
            name: "host_add(0)".into(),
            items: common_items(),
        };
        for (short_item_name, long_item_name, item_type) in [
            ("HN", "Host Name", STRING_TYPE),
            ("HNA", "Host Name Alias", STRING_TYPE),
            ("HA", "Host Architecture", STRING_TYPE),
            ("HSP", "Host Speed", INT_TYPE),
        ] {
            description.items.push(ItemDescription {
                short_name: short_item_name.into(),
                long_name: long_item_name.into(),
                type_code: item_type,
            });
        }
        let alias = host.name.split('.').next().unwrap_or(host.name);
        let names = [host.name, alias, host.arch].map(|name| sized_string(name.as_bytes()));
        let mut values = vec![at.common_values(host.tid)];
        values.extend(names);
        values.push(host.speed.to_string());
        let mut out = String::new();
        self.append_record(&description, 1000 + 2 * HOST_ADD_EVENT, &values, &mut out);
        out
    }
}

/// Returns short and long name of an item whose names are unknown. A task sends the names once,
/// possibly with records of an earlier job.
fn default_names(id: i32) -> (String, String) {
    let item_name = usize::try_from(id)
        .ok()
        .and_then(|index| ITEM_NAMES.get(index))
        .and_then(|name| name.to_str().ok());
    item_name.map_or_else(
        || (id.to_string(), String::new()),
        |item_name| (item_name.to_string(), item_name.to_string()),
    )
}

/// Time since the Unix epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Timestamp {
    pub(crate) seconds: u64,
    /// Microseconds since the last full second.
    pub(crate) micros: u32,
}

impl Timestamp {
    fn common_values(self, tid: Tid) -> String {
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
pub(crate) fn trace_header(date: &str) -> String {
    format!(
        "/*\n * \"Creation Date\" \"{date}\"\n * \"Machine\" \"Console 3.4.6 (PVM 3.4.6)\"\n */ ;;\n\n"
    )
}

fn append_format(out: &mut String, text: std::fmt::Arguments<'_>) {
    out.write_fmt(text).expect("a string takes everything");
}

fn int_item(short_item_name: &str, long_item_name: &str) -> ItemDescription {
    ItemDescription {
        short_name: short_item_name.into(),
        long_name: long_item_name.into(),
        type_code: INT_TYPE,
    }
}

fn common_items() -> Vec<ItemDescription> {
    COMMON_ITEMS
        .iter()
        .map(|(short_item_name, long_item_name)| int_item(short_item_name, long_item_name))
        .collect()
}

/// Returns the description with the name under which records are printed: the event's name with a
/// suffix for entry or exit.
fn with_call_suffix(description: &EventDescription, id: i32) -> EventDescription {
    let suffix = match id & (EVENT_ENTRY_OFFSET | EVENT_EXIT_OFFSET) {
        EVENT_ENTRY_OFFSET => "(0.0)",
        EVENT_EXIT_OFFSET => "(1.1)",
        _ => "(0)",
    };
    EventDescription {
        name: format!("{}{suffix}", description.name),
        items: description.items.clone(),
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

const BYTE_TYPE: i32 = 1;
const COMPLEX_TYPE: i32 = 2;
const DOUBLE_COMPLEX_TYPE: i32 = 3;
const DOUBLE_TYPE: i32 = 4;
const FLOAT_TYPE: i32 = 5;
const INT_TYPE: i32 = 6;
const STRING_TYPE: i32 = 12;

/// Returns the name by which the text identifies a type.
fn type_name(type_code: i32) -> &'static str {
    match type_code & !ARRAY_BIT {
        BYTE_TYPE | STRING_TYPE => "char",
        COMPLEX_TYPE | FLOAT_TYPE => "float",
        DOUBLE_COMPLEX_TYPE | DOUBLE_TYPE => "double",
        _ => "int",
    }
}

fn type_brackets(type_code: i32) -> &'static str {
    match (
        type_code & !ARRAY_BIT == STRING_TYPE,
        type_code & ARRAY_BIT != 0,
    ) {
        (true, true) => "[][]",
        (true, false) | (false, true) => "[]",
        (false, false) => "",
    }
}

fn sized_string(text: &[u8]) -> String {
    format!("[{}] {{ {} }}", text.len() + 1, quote(text))
}

fn quote(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

/// Reads one value of the type `type_code` and returns the value as text.
fn read_value(body: &mut Unpacker, type_code: i32) -> PvmResult<String> {
    if type_code & ARRAY_BIT == 0 {
        return if type_code == STRING_TYPE {
            Ok(sized_string(&body.read_str()?))
        } else {
            read_scalar(body, type_code)
        };
    }
    let count = usize::try_from(body.read_int()?).map_err(|_| PvmError::BadMsg)?;
    // Every item has at least one byte, so a count that exceeds the number of remaining bytes is
    // invalid.
    if count > body.remaining() {
        return Err(PvmError::NoData);
    }
    let type_code = type_code & !ARRAY_BIT;
    if type_code == BYTE_TYPE {
        return Ok(sized_string(&body.read_bytes(count)?));
    }
    if type_code == STRING_TYPE {
        let texts = (0..count)
            .map(|_| body.read_str())
            .collect::<PvmResult<Vec<_>>>()?;
        let longest_bytes = texts.iter().map(|text| text.len() + 1).max().unwrap_or(0);
        let item_texts: Vec<String> = texts.iter().map(|text| quote(text)).collect();
        return Ok(format!(
            "[{count}] [{longest_bytes}] {{ {} }}",
            item_texts.join(", ")
        ));
    }
    let item_texts = (0..count)
        .map(|_| read_scalar(body, type_code))
        .collect::<PvmResult<Vec<_>>>()?;
    Ok(format!("[{count}] {{ {} }}", item_texts.join(", ")))
}

fn read_scalar(body: &mut Unpacker, type_code: i32) -> PvmResult<String> {
    Ok(match type_code {
        BYTE_TYPE => body.read_bytes(1)?[0].to_string(),
        COMPLEX_TYPE => format!("{}, {}", body.read_item::<f32>()?, body.read_item::<f32>()?),
        DOUBLE_COMPLEX_TYPE => {
            format!("{}, {}", body.read_item::<f64>()?, body.read_item::<f64>()?)
        }
        DOUBLE_TYPE => body.read_item::<f64>()?.to_string(),
        FLOAT_TYPE => body.read_item::<f32>()?.to_string(),
        INT_TYPE => body.read_int()?.to_string(),
        7 => body.read_item::<u32>()?.to_string(),
        8 => body.read_item::<i64>()?.to_string(),
        9 => body.read_item::<u64>()?.to_string(),
        10 => body.read_item::<i16>()?.to_string(),
        11 => body.read_item::<u16>()?.to_string(),
        _ => return Err(PvmError::BadMsg),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::body::{Encoding, Packer};

    const TEST_TIME: Timestamp = Timestamp {
        seconds: 1_795_262_880,
        micros: 720_903,
    };

    /// Writes the table of item names and one record of `spawn`, as a task sends them.
    fn append_spawn_exit(out: &mut Packer) {
        out.pack_int(-3);
        for (id, short_item_name, long_item_name) in [
            (10, "TS", "Time Seconds"),
            (11, "CC", "Condition Code"),
            (12, "STL", "Tids"),
        ] {
            out.pack_int(id)
                .pack_str(short_item_name.as_bytes())
                .pack_str(long_item_name.as_bytes());
        }
        out.pack_int(-4);
        out.pack_items([-5, 52 | EVENT_EXIT_OFFSET])
            .pack_str(b"spawn")
            .pack_items([
                10,
                INT_TYPE,
                5,
                11,
                INT_TYPE,
                1,
                12,
                INT_TYPE | ARRAY_BIT,
                1,
                262_147,
                -6,
            ]);
    }

    fn read(records: &mut RecordFormatter, packer: Packer) -> (String, PvmResult<()>) {
        let mut out = String::new();
        let result = records.append_message(&mut Unpacker::new_xdr(packer.finish()), &mut out);
        (out, result)
    }

    /// The description of an event is printed only before the first record of the event.
    #[test]
    fn event_is_described_once() {
        let mut records = RecordFormatter::default();
        let mut body = Packer::new(Encoding::Xdr);
        append_spawn_exit(&mut body);
        let (text, result) = read(&mut records, body);
        assert_eq!(result, Ok(()));
        assert_eq!(
            text,
            "\n#2105: \"spawn(1.1)\"\n{\n\t// \"TS\" \"Time Seconds\"\n\tint \"TS\";\n\t// \"CC\" \"Condition Code\"\n\
             \tint \"CC\";\n\t// \"STL\" \"Tids\"\n\tint \"STL\"[];\n};;\n\n\"spawn(1.1)\" { 5, 1, [1] { 262147 } };;\n"
        );
        let mut body = Packer::new(Encoding::Xdr);
        body.pack_items([-1, -7, 52 | EVENT_EXIT_OFFSET, 6, 0, 0, -8, -2]);
        assert_eq!(
            read(&mut records, body),
            ("\"spawn(1.1)\" { 6, 0, [0] {  } };;\n".into(), Ok(()))
        );
        let mut second_body = Packer::new(Encoding::Xdr);
        append_spawn_exit(&mut second_body);
        assert_eq!(
            read(&mut records, second_body).0,
            "\"spawn(1.1)\" { 5, 1, [1] { 262147 } };;\n"
        );
    }

    #[test]
    fn strings_are_printed_with_lengths() {
        let mut records = RecordFormatter::default();
        let mut body = Packer::new(Encoding::Xdr);
        body.pack_items([-5, 106])
            .pack_str(b"timing")
            .pack_items([999, STRING_TYPE | ARRAY_BIT, 2])
            .pack_str(b"exit")
            .pack_str(b"mhf_invoke");
        body.pack_items([2, STRING_TYPE])
            .pack_str(b"a\"b")
            .pack_int(-6);
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

    #[test]
    fn console_makes_host_and_output_records() {
        let mut records = RecordFormatter::default();
        let tid = Tid::from_raw(262_146);
        assert!(
            records
                .output_record(TEST_TIME, tid, "CREATION")
                .starts_with("\n#1808: \"output(0)\"\n{\n\t// \"TS\" \"Time Seconds\"")
        );
        let second_text = records.output_record(TEST_TIME, tid, "i'm t40002");
        assert_eq!(
            second_text,
            "\"output(0)\" { 1795262880, 720903, 262146, [11] { \"i'm t40002\" } };;\n"
        );
        let host = HostProperties {
            tid: Tid::from_raw(262_144),
            name: "vm.lab",
            arch: "LINUX64",
            speed: 1000,
        };
        let text = records.host_record(TEST_TIME, &host);
        assert!(text.starts_with("\n#1802: \"host_add(0)\"\n"));
        assert!(text.ends_with(
            "\"host_add(0)\" { 1795262880, 720903, 262144, [7] { \"vm.lab\" }, [3] { \"vm\" }, [8] { \"LINUX64\" }, 1000 };;\n"
        ));
    }

    #[test]
    fn user_events_describe_their_items() {
        let mut records = RecordFormatter::default();
        let mut body = Packer::new(Encoding::Xdr);
        body.pack_items([-9, 108])
            .pack_str(b"step")
            .pack_items([7, 8])
            .pack_items([INT_TYPE | ARRAY_BIT, 2, 1, 2, DOUBLE_TYPE])
            .pack_items([0.5f64])
            .pack_int(-10);
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

    #[test]
    fn malformed_records_are_errors() {
        for numbers in [
            vec![-7, 52],
            vec![5],
            vec![-5],
            vec![-5, 1],
            vec![-3, 1],
            vec![-9, 1, -1],
            vec![-5, 3, 2, 0, 4, 0x86, -5],
        ] {
            let mut body = Packer::new(Encoding::Xdr);
            body.pack_items(numbers.clone());
            assert!(
                read(&mut RecordFormatter::default(), body).1.is_err(),
                "{numbers:?}"
            );
        }
        let mut body = Packer::new(Encoding::Xdr);
        body.pack_items([-5, 1])
            .pack_str(b"x")
            .pack_items([1, INT_TYPE | ARRAY_BIT, i32::MAX]);
        assert_eq!(
            read(&mut RecordFormatter::default(), body).1,
            Err(PvmError::NoData)
        );
    }
}
