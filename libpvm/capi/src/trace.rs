//! Records this task's calls for a tracer: their arguments, results and times.
//!
//! - Only the outermost call is recorded. Calls that the library or a group function makes
//!   internally produce no records. Calls in a message handler count as outermost again.
//! - Depending on the option `PvmTraceOptions`, every call is recorded (full), or only the total
//!   time (`OPTION_TIME`) or number (`OPTION_COUNT`) of calls per event, which [`flush`] sends.
//! - Records are collected up to the size of the trace buffer (`PvmTraceBuffer`) and sent together.
//!   Without a buffer each record is sent immediately.

use crate::data::{pvmmytid, pvmtoplvl, pvmtrc};
use crate::process;
use crate::session;
use sempa_proto::body::{Encoding, Packer};
use sempa_proto::message::{ENC_TRACE, ENC_XDR};
use sempa_proto::trace::{
    EVENT_ENTRY_OFFSET, EVENT_EXIT_OFFSET, TraceItem, TraceValue, USER_EVENT_END_MARKER, int_item,
    ints_item, mask_selects, pack_group, pack_record, record_head,
};
use sempa_proto::{Message, Tid};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) use libpvm::trace_events::EventMask;

/// `PvmTraceTime`: record the total time of each kind of call.
const OPTION_TIME: i32 = 2;
/// `PvmTraceCount`: record the number of each kind of call.
const OPTION_COUNT: i32 = 3;
/// Upper bound of the collected records in bytes, whatever buffer size a program requests.
const COLLECTED_BYTES_MAX: usize = 1 << 20;

/// Totals of one kind of call, kept when only times or numbers are recorded.
#[derive(Clone, Copy, Debug, Default)]
struct CallTotals {
    micros: i64,
    count: i32,
}

/// Records that have not been sent yet, and the events that the tracer already knows.
#[derive(Debug, Default)]
struct TraceState {
    /// Tid, context and tag to which the descriptions in `described_events` were sent.
    sink: (i32, i32, i32),
    described_events: BTreeSet<i32>,
    collected: Vec<u8>,
    totals: BTreeMap<i32, CallTotals>,
}

static STATE: Mutex<TraceState> = Mutex::new(TraceState {
    sink: (0, 0, 0),
    described_events: BTreeSet::new(),
    collected: Vec::new(),
    totals: BTreeMap::new(),
});

fn state() -> MutexGuard<'static, TraceState> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    /// True while this thread is in a call of the library.
    static IN_LIBRARY_CALL: Cell<bool> = const { Cell::new(false) };
}

/// Runs code of the program within a call of the library. Calls that this code makes count as
/// outermost.
pub(crate) fn run_program_code<R>(run: impl FnOnce() -> R) -> R {
    let inside = IN_LIBRARY_CALL.replace(false);
    let answer = run();
    IN_LIBRARY_CALL.set(inside);
    answer
}

/// True if another task receives the trace of this task.
fn has_tracer() -> bool {
    let sink = pvmtrc.trace_tid.load(Relaxed);
    sink > 0 && sink != pvmmytid.load(Relaxed)
}

fn enabled_event_number(event: &str) -> Option<i32> {
    if !has_tracer() {
        return None;
    }
    let number = EventMask::event_number(event)? as i32;
    mask_selects(&pvmtrc.mask(), number).then_some(number)
}

/// Runs a call of the interface and records it. `entry` and `exit` return the items to record
/// before and after `body`.
pub(crate) fn traced_call<R>(
    event: &str,
    entry: impl FnOnce() -> Vec<TraceItem>,
    body: impl FnOnce() -> R,
    exit: impl FnOnce(&R) -> Vec<TraceItem>,
) -> R {
    IN_LIBRARY_CALL.with(|inside| {
        if inside.get() || pvmtoplvl.load(Relaxed) == 0 {
            return body();
        }
        // A process that enrols in this call does not know before the end of the call whether it is
        // traced.
        if !has_tracer() && pvmmytid.load(Relaxed) != -1 {
            inside.set(true);
            let answer = body();
            inside.set(false);
            return answer;
        }
        recorded_call(inside, event, entry, body, exit)
    })
}

/// Runs a call and records it if its event is enabled. If the call itself enrols the process, its
/// entry event is recorded after the call.
fn recorded_call<R>(
    inside: &Cell<bool>,
    event: &str,
    entry: impl FnOnce() -> Vec<TraceItem>,
    body: impl FnOnce() -> R,
    exit: impl FnOnce(&R) -> Vec<TraceItem>,
) -> R {
    let began = process::now();
    let mut entry = Some(entry);
    if let Some(number) = enabled_event_number(event) {
        record(
            event,
            number | EVENT_ENTRY_OFFSET,
            began,
            entry.take().map(|entry| entry()).unwrap_or_default(),
        );
    }
    inside.set(true);
    let answer = body();
    inside.set(false);
    if let Some(number) = enabled_event_number(event) {
        if let Some(entry) = entry {
            record(event, number | EVENT_ENTRY_OFFSET, began, entry());
        }
        let ended = process::now();
        if pvmtrc.trace_opt.load(Relaxed) == OPTION_TIME {
            let micros = |(seconds, micros): (i64, i64)| seconds * 1_000_000 + micros;
            state().totals.entry(number).or_default().micros += micros(ended) - micros(began);
        }
        record(event, number | EVENT_EXIT_OFFSET, ended, exit(&answer));
    }
    answer
}

/// Events that code outside of this library reports through PVM's exported names. PVM's group
/// library reports its calls in this way.
pub(crate) mod external {
    use super::{
        EVENT_ENTRY_OFFSET, EVENT_EXIT_OFFSET, OPTION_TIME, TraceItem, event_name, has_tracer,
        process, pvmtrc, record, state,
    };
    use sempa_proto::trace::mask_selects;
    use std::cell::{Cell, RefCell};
    use std::sync::atomic::Ordering::Relaxed;

    /// Maximum number of items of one record; PVM's records have at most twenty.
    const ITEMS_MAX: usize = 64;

    /// A record under construction.
    struct OpenRecord {
        event: i32,
        at: (i64, i64),
        items: Vec<TraceItem>,
    }

    thread_local! {
        static OPEN_RECORD: RefCell<Option<OpenRecord>> = const { RefCell::new(None) };
        /// Start of the call whose end is recorded next.
        static CALL_START: Cell<(i64, i64)> = const { Cell::new((0, 0)) };
    }

    /// True if the tracer wants this event.
    pub(crate) fn is_enabled(number: i32) -> bool {
        has_tracer()
            && (0..libpvm::trace_events::EVENT_NAMES.len() as i32).contains(&number)
            && mask_selects(&pvmtrc.mask(), number)
    }

    /// Starts a record of an event, or of the begin or end of a call. Returns false, with nothing
    /// started, if the event is not enabled.
    pub(crate) fn begin_record(number: i32, which: i32) -> bool {
        if !is_enabled(number) || ![0, EVENT_ENTRY_OFFSET, EVENT_EXIT_OFFSET].contains(&which) {
            return false;
        }
        let at = process::now();
        if which != EVENT_EXIT_OFFSET {
            CALL_START.set(at);
        } else if pvmtrc.trace_opt.load(Relaxed) == OPTION_TIME {
            let began = CALL_START.get();
            state().totals.entry(number).or_default().micros +=
                (at.0 - began.0) * 1_000_000 + at.1 - began.1;
        }
        OPEN_RECORD.set(Some(OpenRecord {
            event: number | which,
            at,
            items: Vec::new(),
        }));
        true
    }

    /// Adds an item to the record under construction. Returns false if there is no such record or
    /// if the record is full.
    pub(crate) fn add_item(item: TraceItem) -> bool {
        OPEN_RECORD.with_borrow_mut(|open| match open {
            Some(open) if open.items.len() < ITEMS_MAX => {
                open.items.push(item);
                true
            }
            _ => false,
        })
    }

    /// Completes the record under construction, if any, and adds it to the collected records.
    pub(crate) fn end_record() {
        if let Some(OpenRecord { event, at, items }) = OPEN_RECORD.take() {
            let name = event_name(event & !(EVENT_ENTRY_OFFSET | EVENT_EXIT_OFFSET));
            record(std::str::from_utf8(name).unwrap_or("?"), event, at, items);
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

/// Records an event without an end, such as `exit`.
pub(crate) fn record_event(event: &str, items: impl FnOnce() -> Vec<TraceItem>) {
    if IN_LIBRARY_CALL.get() && event != "mhf_invoke" {
        return;
    }
    if let Some(number) = enabled_event_number(event) {
        record(event, number | EVENT_ENTRY_OFFSET, process::now(), items());
    }
}

/// Returns the items of a call that returns only a code.
pub(crate) fn return_code_items(answer: &i32) -> Vec<TraceItem> {
    vec![int_item("CC", *answer)]
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

fn record(name: &str, event: i32, at: (i64, i64), items: Vec<TraceItem>) {
    let mut state = state();
    if matches!(pvmtrc.trace_opt.load(Relaxed), OPTION_TIME | OPTION_COUNT) {
        state
            .totals
            .entry(event & !(EVENT_ENTRY_OFFSET | EVENT_EXIT_OFFSET))
            .or_default()
            .count += 1;
        return;
    }
    state.append(name, event, at, items);
    let limit = usize::try_from(pvmtrc.trace_buf.load(Relaxed))
        .unwrap_or(0)
        .min(COLLECTED_BYTES_MAX);
    if state.collected.len() > limit {
        state.send(limit > 0);
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
            .map(|place| place.load(Relaxed));
        let sink = (sink[0], sink[1], sink[2]);
        if self.sink != sink {
            (self.sink, self.described_events) = (sink, BTreeSet::new());
        }
        let mut all = record_head(seconds as i32, micros as i32, pvmmytid.load(Relaxed));
        all.extend(items);
        let mut out = Packer::new(Encoding::Xdr);
        let describe = self.described_events.insert(event);
        pack_record(&mut out, event, describe.then_some(name), &all);
        self.collected.extend_from_slice(&out.finish());
    }

    fn send(&mut self, group: bool) {
        let records = std::mem::take(&mut self.collected);
        let mut out = Packer::new(Encoding::Xdr);
        if group {
            pack_group(&mut out, &records);
        } else {
            out.append_encoded(&records);
        }
        send_to_tracer(self.sink, ENC_XDR, out.finish());
    }
}

fn send_to_tracer((tid, ctx, tag): (i32, i32, i32), enc: i32, body: bytes::Bytes) {
    // The session is not locked at this point: records are made before or after a call, never
    // within it.
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
        // An error means that the tracer is unreachable. The tracer misses the record, and the
        // program continues.
        let _ = rt.send(message);
    }
}

/// Sends the collected records, or the totals if only those are recorded.
pub(crate) fn flush() {
    let mut state = state();
    if has_tracer() && !state.totals.is_empty() {
        let timing = pvmtrc.trace_opt.load(Relaxed) == OPTION_TIME;
        let sums = std::mem::take(&mut state.totals);
        let names = sums
            .keys()
            .map(|event| event_name(*event).to_vec())
            .collect();
        let mut items = vec![
            int_item("VCT", sums.len() as i32),
            text_list_item("VID", names),
        ];
        if timing {
            items.push(ints_item(
                "TGS",
                sums.values()
                    .map(|sum| (sum.micros / 1_000_000) as i32)
                    .collect(),
            ));
            items.push(ints_item(
                "TGU",
                sums.values()
                    .map(|sum| (sum.micros % 1_000_000) as i32)
                    .collect(),
            ));
        }
        items.push(ints_item(
            "PRF",
            sums.values().map(|sum| sum.count).collect(),
        ));
        let name = if timing { "timing" } else { "profiling" };
        let number = EventMask::event_number(name).map_or(0, |number| number as i32);
        state.append(name, number, process::now(), items);
    }
    if !state.collected.is_empty() {
        let group = pvmtrc.trace_buf.load(Relaxed) > 0
            && !matches!(pvmtrc.trace_opt.load(Relaxed), OPTION_TIME | OPTION_COUNT);
        state.send(group);
    }
}

fn event_name(number: i32) -> &'static [u8] {
    let name = usize::try_from(number)
        .ok()
        .and_then(|at| libpvm::trace_events::EVENT_NAMES.get(at));
    name.map_or(b"?".as_slice(), |name| name.to_bytes())
}

/// Sends an event that the program has defined, if the tracer wants such events.
pub(crate) fn user_event(body: &[u8]) {
    if enabled_event_number("user_defined").is_none() {
        return;
    }
    let mut out = Packer::new(Encoding::Xdr);
    out.append_encoded(body).int(USER_EVENT_END_MARKER);
    let sink =
        [&pvmtrc.trace_tid, &pvmtrc.trace_ctx, &pvmtrc.trace_tag].map(|place| place.load(Relaxed));
    send_to_tracer((sink[0], sink[1], sink[2]), ENC_TRACE, out.finish());
}
