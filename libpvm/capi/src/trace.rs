//! Records this task's calls for a tracer: their arguments, results and times.
//!
//! - Only the outermost call is recorded. Calls that the library or a group function makes
//!   internally produce no records. Calls in a message handler count as outermost again.
//! - The option `PvmTraceOptions` determines what is recorded: every call (full), or only the total
//!   time (`OPTION_TIME`) or the number (`OPTION_COUNT`) of calls of each event.
//!   [`send_collected_records`] sends the totals.
//! - Records are collected up to the size of the trace buffer (`PvmTraceBuffer`) and sent together.
//!   Without a buffer each record is sent immediately.

use crate::data::{pvmmytid, pvmtoplvl, pvmtrc};
use crate::process;
use crate::session;
use sempa_proto::body::{Encoding, Packer};
use sempa_proto::message::{ENC_TRACE, ENC_XDR};
use sempa_proto::trace::{
    EVENT_ENTRY_OFFSET, EVENT_EXIT_OFFSET, TraceItem, TraceValue, USER_EVENT_END_MARKER, int_item,
    ints_item, mask_selects, pack_group, pack_record, record_head_items,
};
use sempa_proto::{Message, Tid};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) use libpvm::trace_events::EventMask;

/// Value of `PvmTraceTime`: the total time of the calls of each event is recorded.
const OPTION_TIME: i32 = 2;
/// Value of `PvmTraceCount`: the number of calls of each event is recorded.
const OPTION_COUNT: i32 = 3;
/// Maximum total size of the collected records in bytes. A larger buffer size that a program
/// requests has no effect.
const COLLECTED_BYTES_MAX: usize = 1 << 20;

/// Totals of the calls of one event, if only times or numbers are recorded.
#[derive(Clone, Copy, Debug, Default)]
struct CallTotals {
    micros: i64,
    call_count: i32,
}

/// Records that have not been sent yet, and the events whose descriptions have been sent to the
/// tracer.
#[derive(Debug, Default)]
struct TraceState {
    /// Tid, context and tag to which the descriptions in `described_events` were sent.
    sink: (i32, i32, i32),
    described_events: BTreeSet<i32>,
    collected_records: Vec<u8>,
    totals_by_event: BTreeMap<i32, CallTotals>,
}

static STATE: Mutex<TraceState> = Mutex::new(TraceState {
    sink: (0, 0, 0),
    described_events: BTreeSet::new(),
    collected_records: Vec::new(),
    totals_by_event: BTreeMap::new(),
});

fn lock_state() -> MutexGuard<'static, TraceState> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    /// True while this thread is in a call of the library.
    static IN_LIBRARY_CALL: Cell<bool> = const { Cell::new(false) };
}

/// Runs code of the program within a call of the library. Calls that this code makes count as
/// outermost.
pub(crate) fn run_program_code<R>(program_code: impl FnOnce() -> R) -> R {
    let was_in_call = IN_LIBRARY_CALL.replace(false);
    let result = program_code();
    IN_LIBRARY_CALL.set(was_in_call);
    result
}

/// True if the trace of this task is sent to another task.
#[inline]
fn has_tracer() -> bool {
    let tracer_tid = pvmtrc.trace_tid.load(Relaxed);
    tracer_tid > 0 && tracer_tid != pvmmytid.load(Relaxed)
}

fn enabled_event_number(event: &str) -> Option<i32> {
    if !has_tracer() {
        return None;
    }
    let number = EventMask::event_number(event)? as i32;
    mask_selects(&pvmtrc.mask(), number).then_some(number)
}

/// Runs a call of the interface and records the call. `entry_items` and `exit_items` return the
/// items to record before and after `body`.
pub(crate) fn traced_call<R>(
    event: &str,
    entry_items: impl FnOnce() -> Vec<TraceItem>,
    body: impl FnOnce() -> R,
    exit_items: impl FnOnce(&R) -> Vec<TraceItem>,
) -> R {
    IN_LIBRARY_CALL.with(|in_call| {
        if in_call.get() || pvmtoplvl.load(Relaxed) == 0 {
            return body();
        }
        // If the process enrols in this call, the library knows only after the call whether a
        // tracer receives the trace.
        if !has_tracer() && pvmmytid.load(Relaxed) != -1 {
            in_call.set(true);
            let result = body();
            in_call.set(false);
            return result;
        }
        record_call(in_call, event, entry_items, body, exit_items)
    })
}

/// As [`traced_call`], for a call whose `body` makes no other calls of the interface, except in
/// code of the program.
#[inline]
pub(crate) fn traced_leaf_call<R>(
    event: &str,
    entry_items: impl FnOnce() -> Vec<TraceItem>,
    body: impl FnOnce() -> R,
    exit_items: impl FnOnce(&R) -> Vec<TraceItem>,
) -> R {
    if !has_tracer() && pvmmytid.load(Relaxed) != -1 {
        return body();
    }
    record_leaf_call(event, entry_items, body, exit_items)
}

#[cold]
fn record_leaf_call<R>(
    event: &str,
    entry_items: impl FnOnce() -> Vec<TraceItem>,
    body: impl FnOnce() -> R,
    exit_items: impl FnOnce(&R) -> Vec<TraceItem>,
) -> R {
    traced_call(event, entry_items, body, exit_items)
}

/// Runs a call and records the call if its event is enabled. If the call itself enrols the process,
/// its entry event is recorded after the call.
fn record_call<R>(
    in_call: &Cell<bool>,
    event: &str,
    entry: impl FnOnce() -> Vec<TraceItem>,
    body: impl FnOnce() -> R,
    exit_items: impl FnOnce(&R) -> Vec<TraceItem>,
) -> R {
    let start_time = process::unix_time();
    let mut entry = Some(entry);
    if let Some(number) = enabled_event_number(event) {
        append_record(
            event,
            number | EVENT_ENTRY_OFFSET,
            start_time,
            entry.take().map(|entry| entry()).unwrap_or_default(),
        );
    }
    in_call.set(true);
    let result = body();
    in_call.set(false);
    if let Some(number) = enabled_event_number(event) {
        if let Some(entry) = entry {
            append_record(event, number | EVENT_ENTRY_OFFSET, start_time, entry());
        }
        let end_time = process::unix_time();
        if pvmtrc.trace_opt.load(Relaxed) == OPTION_TIME {
            let micros = |(seconds, micros): (i64, i64)| seconds * 1_000_000 + micros;
            lock_state()
                .totals_by_event
                .entry(number)
                .or_default()
                .micros += micros(end_time) - micros(start_time);
        }
        append_record(
            event,
            number | EVENT_EXIT_OFFSET,
            end_time,
            exit_items(&result),
        );
    }
    result
}

/// Events that code outside of this library reports through PVM's exported names. PVM's group
/// library reports its calls in this way.
pub(crate) mod external {
    use super::{
        EVENT_ENTRY_OFFSET, EVENT_EXIT_OFFSET, OPTION_TIME, TraceItem, append_record, event_name,
        has_tracer, lock_state, process, pvmtrc,
    };
    use sempa_proto::trace::mask_selects;
    use std::cell::{Cell, RefCell};
    use std::sync::atomic::Ordering::Relaxed;

    /// Maximum number of items of one record; PVM's records have at most twenty.
    const RECORD_ITEMS_MAX: usize = 64;

    /// A record under construction.
    struct OpenRecord {
        event: i32,
        time: (i64, i64),
        items: Vec<TraceItem>,
    }

    thread_local! {
        static OPEN_RECORD: RefCell<Option<OpenRecord>> = const { RefCell::new(None) };
        /// Start of the call whose end is recorded next.
        static CALL_START: Cell<(i64, i64)> = const { Cell::new((0, 0)) };
    }

    /// True if a tracer receives the trace and the tracer's mask selects this event.
    pub(crate) fn is_enabled(number: i32) -> bool {
        has_tracer()
            && (0..libpvm::trace_events::EVENT_NAMES.len() as i32).contains(&number)
            && mask_selects(&pvmtrc.mask(), number)
    }

    /// Starts a record of an event, or of the entry or exit of a call. `entry_or_exit` is 0 or one
    /// of the two offsets. Returns false without starting a record if the event is not enabled or
    /// `entry_or_exit` is invalid.
    pub(crate) fn begin_record(number: i32, entry_or_exit: i32) -> bool {
        if !is_enabled(number)
            || ![0, EVENT_ENTRY_OFFSET, EVENT_EXIT_OFFSET].contains(&entry_or_exit)
        {
            return false;
        }
        let time = process::unix_time();
        if entry_or_exit != EVENT_EXIT_OFFSET {
            CALL_START.set(time);
        } else if pvmtrc.trace_opt.load(Relaxed) == OPTION_TIME {
            let start_time = CALL_START.get();
            lock_state()
                .totals_by_event
                .entry(number)
                .or_default()
                .micros += (time.0 - start_time.0) * 1_000_000 + time.1 - start_time.1;
        }
        OPEN_RECORD.set(Some(OpenRecord {
            event: number | entry_or_exit,
            time,
            items: Vec::new(),
        }));
        true
    }

    /// Adds an item to the record under construction. Returns false if there is no such record or
    /// if the record is full.
    pub(crate) fn add_item(item: TraceItem) -> bool {
        OPEN_RECORD.with_borrow_mut(|open_record| match open_record {
            Some(open_record) if open_record.items.len() < RECORD_ITEMS_MAX => {
                open_record.items.push(item);
                true
            }
            _ => false,
        })
    }

    /// Completes the record under construction, if any, and adds it to the collected records.
    pub(crate) fn end_record() {
        if let Some(OpenRecord {
            event,
            time: record_time,
            items,
        }) = OPEN_RECORD.take()
        {
            let name = event_name(event & !(EVENT_ENTRY_OFFSET | EVENT_EXIT_OFFSET));
            append_record(
                std::str::from_utf8(name).unwrap_or("?"),
                event,
                record_time,
                items,
            );
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;
        use sempa_proto::trace::int_item;

        /// Without a tracer no event is enabled, and no record can be started.
        #[test]
        fn untraced_event_starts_no_record() {
            assert!(!begin_record(1, EVENT_ENTRY_OFFSET) && !add_item(int_item("CC", 1)));
            assert!(!is_enabled(-1) && !is_enabled(i32::MAX));
        }
    }
}

/// Records an event without an end, such as `exit`. Within a call of the library, only the event
/// `mhf_invoke` is recorded.
pub(crate) fn record_event(event: &str, items: impl FnOnce() -> Vec<TraceItem>) {
    if IN_LIBRARY_CALL.get() && event != "mhf_invoke" {
        return;
    }
    if let Some(number) = enabled_event_number(event) {
        append_record(
            event,
            number | EVENT_ENTRY_OFFSET,
            process::unix_time(),
            items(),
        );
    }
}

/// Returns the items of a call that returns only a code.
pub(crate) fn return_code_items(code: &i32) -> Vec<TraceItem> {
    vec![int_item("CC", *code)]
}

/// Returns an item with an address in the program's memory.
pub(crate) fn address_item<T>(name: &'static str, pointer: *const T) -> TraceItem {
    TraceItem {
        name,
        value: TraceValue::Long(pointer as i64),
    }
}

pub(crate) fn text_list_item(name: &'static str, value: Vec<Vec<u8>>) -> TraceItem {
    TraceItem {
        name,
        value: TraceValue::Texts(value),
    }
}

/// Returns an empty list, for records without items.
pub(crate) fn no_items() -> Vec<TraceItem> {
    Vec::new()
}

fn append_record(name: &str, event: i32, time: (i64, i64), items: Vec<TraceItem>) {
    let mut state = lock_state();
    if matches!(pvmtrc.trace_opt.load(Relaxed), OPTION_TIME | OPTION_COUNT) {
        state
            .totals_by_event
            .entry(event & !(EVENT_ENTRY_OFFSET | EVENT_EXIT_OFFSET))
            .or_default()
            .call_count += 1;
        return;
    }
    state.append(name, event, time, items);
    let buffer_bytes_max = usize::try_from(pvmtrc.trace_buf.load(Relaxed))
        .unwrap_or(0)
        .min(COLLECTED_BYTES_MAX);
    if state.collected_records.len() > buffer_bytes_max {
        state.send(buffer_bytes_max > 0);
    }
}

impl TraceState {
    fn append(
        &mut self,
        name: &str,
        event: i32,
        (seconds, micros): (i64, i64),
        items: Vec<TraceItem>,
    ) {
        let sink = [&pvmtrc.trace_tid, &pvmtrc.trace_ctx, &pvmtrc.trace_tag]
            .map(|field| field.load(Relaxed));
        let sink = (sink[0], sink[1], sink[2]);
        if self.sink != sink {
            (self.sink, self.described_events) = (sink, BTreeSet::new());
        }
        let mut record_items =
            record_head_items(seconds as i32, micros as i32, pvmmytid.load(Relaxed));
        record_items.extend(items);
        let mut packer = Packer::new(Encoding::Xdr);
        let is_first_record = self.described_events.insert(event);
        pack_record(
            &mut packer,
            event,
            is_first_record.then_some(name),
            &record_items,
        );
        self.collected_records.extend_from_slice(&packer.finish());
    }

    fn send(&mut self, is_group: bool) {
        let records = std::mem::take(&mut self.collected_records);
        let mut packer = Packer::new(Encoding::Xdr);
        if is_group {
            pack_group(&mut packer, &records);
        } else {
            packer.append_encoded(&records);
        }
        send_to_tracer(self.sink, ENC_XDR, packer.finish());
    }
}

fn send_to_tracer((tid, ctx, tag): (i32, i32, i32), enc: i32, body: bytes::Bytes) {
    // The session is not locked at this point: records are made before or after a call, never
    // during a call.
    if let Some(rt) = session::lock().connected_runtime() {
        let message = Message {
            src: rt.tid(),
            dst: Tid::from_raw(tid),
            ctx,
            tag,
            wid: 0,
            enc,
            body,
        };
        // An error means that the tracer is unreachable. The record is lost, and the program
        // continues.
        let _ = rt.send(message);
    }
}

/// Sends the collected records. If only times or numbers are recorded, also sends the totals.
pub(crate) fn send_collected_records() {
    let mut state = lock_state();
    if has_tracer() && !state.totals_by_event.is_empty() {
        let records_times = pvmtrc.trace_opt.load(Relaxed) == OPTION_TIME;
        let totals = std::mem::take(&mut state.totals_by_event);
        let names = totals
            .keys()
            .map(|event| event_name(*event).to_vec())
            .collect();
        let mut items = vec![
            int_item("VCT", totals.len() as i32),
            text_list_item("VID", names),
        ];
        if records_times {
            items.push(ints_item(
                "TGS",
                totals
                    .values()
                    .map(|total| (total.micros / 1_000_000) as i32)
                    .collect(),
            ));
            items.push(ints_item(
                "TGU",
                totals
                    .values()
                    .map(|total| (total.micros % 1_000_000) as i32)
                    .collect(),
            ));
        }
        items.push(ints_item(
            "PRF",
            totals.values().map(|total| total.call_count).collect(),
        ));
        let name = if records_times { "timing" } else { "profiling" };
        let number = EventMask::event_number(name).map_or(0, |number| number as i32);
        state.append(name, number, process::unix_time(), items);
    }
    if !state.collected_records.is_empty() {
        let is_group = pvmtrc.trace_buf.load(Relaxed) > 0
            && !matches!(pvmtrc.trace_opt.load(Relaxed), OPTION_TIME | OPTION_COUNT);
        state.send(is_group);
    }
}

fn event_name(number: i32) -> &'static [u8] {
    let name = usize::try_from(number)
        .ok()
        .and_then(|index| libpvm::trace_events::EVENT_NAMES.get(index));
    name.map_or(b"?".as_slice(), |name| name.to_bytes())
}

/// Sends an event that the program has defined, if the tracer's mask selects such events.
pub(crate) fn send_user_event(body: &[u8]) {
    if enabled_event_number("user_defined").is_none() {
        return;
    }
    let mut packer = Packer::new(Encoding::Xdr);
    packer.append_encoded(body).pack_int(USER_EVENT_END_MARKER);
    let sink =
        [&pvmtrc.trace_tid, &pvmtrc.trace_ctx, &pvmtrc.trace_tag].map(|field| field.load(Relaxed));
    send_to_tracer((sink[0], sink[1], sink[2]), ENC_TRACE, packer.finish());
}
