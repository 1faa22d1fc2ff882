//! Trace records of this task: which calls it makes and what becomes of them, for a tracer that wants to know.
//!
//! Only the outermost call is traced: what the library, or a group function, does inside makes no records. A message
//! handler is outside again.

use crate::data::{pvmmytid, pvmtoplvl, pvmtrc};
use crate::process;
use crate::session;
use sempa_proto::body::{Encoding, Packer};
use sempa_proto::message::{ENC_TRACE, ENC_XDR};
use sempa_proto::trace::{
    EVENT_ENTRY, EVENT_EXIT, Item, USER_EVENT_END, Value, head, int, ints, mask_has, pack_group,
    pack_record,
};
use sempa_proto::{Message, Tid};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) use libpvm::trace_events::EventMask;

/// `PvmTraceTime`: how long each kind of call took.
const TIME: i32 = 2;
/// `PvmTraceCount`: how often each kind was made.
const COUNT: i32 = 3;
/// Bytes of collected records at most, whatever a program asks for.
const COLLECTED_BYTES_MAX: usize = 1 << 20;

/// What one kind of call has come to, when only time or number is wanted.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    micros: i64,
    count: i32,
}

/// The records of this task that have not been sent, and what the tracer knows already.
#[derive(Debug, Default)]
struct State {
    /// Whom it was told to.
    sink: (i32, i32, i32),
    described: BTreeSet<i32>,
    collected: Vec<u8>,
    sums: BTreeMap<i32, Sum>,
}

static STATE: Mutex<State> = Mutex::new(State {
    sink: (0, 0, 0),
    described: BTreeSet::new(),
    collected: Vec::new(),
    sums: BTreeMap::new(),
});

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    /// True while this thread is inside a call of the library.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Runs code of the program from inside a call: its calls are outermost again.
pub(crate) fn outside<R>(run: impl FnOnce() -> R) -> R {
    let inside = INSIDE.replace(false);
    let answer = run();
    INSIDE.set(inside);
    answer
}

/// True when somebody else wants the trace of this task.
fn has_tracer() -> bool {
    let sink = pvmtrc.trace_tid.load(Relaxed);
    sink > 0 && sink != pvmmytid.load(Relaxed)
}

fn number_if_wanted(event: &str) -> Option<i32> {
    if !has_tracer() {
        return None;
    }
    let number = EventMask::event(event)? as i32;
    mask_has(&pvmtrc.mask(), number).then_some(number)
}

/// A call of the interface: `entry` and `exit` give what is recorded before and after `body`.
pub(crate) fn call<R>(
    event: &str,
    entry: impl FnOnce() -> Vec<Item>,
    body: impl FnOnce() -> R,
    exit: impl FnOnce(&R) -> Vec<Item>,
) -> R {
    INSIDE.with(|inside| {
        if inside.get() || pvmtoplvl.load(Relaxed) == 0 {
            return body();
        }
        // A process that enrols by this call learns only then that it is traced.
        if !has_tracer() && pvmmytid.load(Relaxed) != -1 {
            inside.set(true);
            let answer = body();
            inside.set(false);
            return answer;
        }
        recorded(inside, event, entry, body, exit)
    })
}

/// A call that a tracer may want to know of.
fn recorded<R>(
    inside: &Cell<bool>,
    event: &str,
    entry: impl FnOnce() -> Vec<Item>,
    body: impl FnOnce() -> R,
    exit: impl FnOnce(&R) -> Vec<Item>,
) -> R {
    let began = process::clock();
    let mut entry = Some(entry);
    if let Some(number) = number_if_wanted(event) {
        record(
            event,
            number | EVENT_ENTRY,
            began,
            entry.take().map(|entry| entry()).unwrap_or_default(),
        );
    }
    inside.set(true);
    let answer = body();
    inside.set(false);
    if let Some(number) = number_if_wanted(event) {
        if let Some(entry) = entry {
            record(event, number | EVENT_ENTRY, began, entry());
        }
        let ended = process::clock();
        if pvmtrc.trace_opt.load(Relaxed) == TIME {
            let micros = |(seconds, micros): (i64, i64)| seconds * 1_000_000 + micros;
            state().sums.entry(number).or_default().micros += micros(ended) - micros(began);
        }
        record(event, number | EVENT_EXIT, ended, exit(&answer));
    }
    answer
}

/// Events that code outside of this library tells through PVM's own names, as PVM's group library does of its calls.
pub(crate) mod foreign {
    use super::{
        EVENT_ENTRY, EVENT_EXIT, Item, TIME, event_name, has_tracer, process, pvmtrc, record, state,
    };
    use sempa_proto::trace::mask_has;
    use std::cell::{Cell, RefCell};
    use std::sync::atomic::Ordering::Relaxed;

    /// Items of one record at most; PVM's have twenty.
    const ITEMS_MAX: usize = 64;

    /// A record that is being made.
    struct Open {
        event: i32,
        at: (i64, i64),
        items: Vec<Item>,
    }

    thread_local! {
        static OPEN: RefCell<Option<Open>> = const { RefCell::new(None) };
        /// When the call began whose end is told next.
        static BEGAN: Cell<(i64, i64)> = const { Cell::new((0, 0)) };
    }

    /// Does the tracer want this kind of event?
    pub(crate) fn wanted(number: i32) -> bool {
        has_tracer()
            && (0..libpvm::trace_events::EVENTS.len() as i32).contains(&number)
            && mask_has(&pvmtrc.mask(), number)
    }

    /// Begins a record of a call's begin or end. False: it is not wanted, and nothing was begun.
    pub(crate) fn begin(number: i32, which: i32) -> bool {
        if !wanted(number) || ![0, EVENT_ENTRY, EVENT_EXIT].contains(&which) {
            return false;
        }
        let at = process::clock();
        if which != EVENT_EXIT {
            BEGAN.set(at);
        } else if pvmtrc.trace_opt.load(Relaxed) == TIME {
            let began = BEGAN.get();
            state().sums.entry(number).or_default().micros +=
                (at.0 - began.0) * 1_000_000 + at.1 - began.1;
        }
        OPEN.set(Some(Open {
            event: number | which,
            at,
            items: Vec::new(),
        }));
        true
    }

    /// Adds an item to the record that was begun. False: there is none, or it has no room.
    pub(crate) fn add(item: Item) -> bool {
        OPEN.with_borrow_mut(|open| match open {
            Some(open) if open.items.len() < ITEMS_MAX => {
                open.items.push(item);
                true
            }
            _ => false,
        })
    }

    /// Ends the record that was begun.
    pub(crate) fn end() {
        if let Some(Open { event, at, items }) = OPEN.take() {
            let name = event_name(event & !(EVENT_ENTRY | EVENT_EXIT));
            record(std::str::from_utf8(name).unwrap_or("?"), event, at, items);
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;
        use sempa_proto::trace::int;

        #[test]
        fn what_no_tracer_wants_begins_no_record() {
            assert!(!begin(1, EVENT_ENTRY) && !add(int("CC", 1)));
            assert!(!wanted(-1) && !wanted(i32::MAX));
        }
    }
}

/// A record without an end, such as that of leaving.
pub(crate) fn once(event: &str, items: impl FnOnce() -> Vec<Item>) {
    if INSIDE.get() && event != "mhf_invoke" {
        return;
    }
    if let Some(number) = number_if_wanted(event) {
        record(event, number | EVENT_ENTRY, process::clock(), items());
    }
}

/// The answer of most calls.
pub(crate) fn cc(answer: &i32) -> Vec<Item> {
    vec![int("CC", *answer)]
}

/// An address of the program.
pub(crate) fn address<T>(name: &'static str, place: *const T) -> Item {
    Item {
        name,
        value: Value::Long(place as i64),
    }
}

/// Texts.
pub(crate) fn texts(name: &'static str, value: Vec<Vec<u8>>) -> Item {
    Item {
        name,
        value: Value::Texts(value),
    }
}

/// Nothing but the head.
pub(crate) fn nothing() -> Vec<Item> {
    Vec::new()
}

fn record(name: &str, event: i32, at: (i64, i64), items: Vec<Item>) {
    let mut state = state();
    if matches!(pvmtrc.trace_opt.load(Relaxed), TIME | COUNT) {
        state
            .sums
            .entry(event & !(EVENT_ENTRY | EVENT_EXIT))
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

impl State {
    fn append(&mut self, name: &str, event: i32, (seconds, micros): (i64, i64), items: Vec<Item>) {
        let sink = [&pvmtrc.trace_tid, &pvmtrc.trace_ctx, &pvmtrc.trace_tag]
            .map(|place| place.load(Relaxed));
        let sink = (sink[0], sink[1], sink[2]);
        if self.sink != sink {
            (self.sink, self.described) = (sink, BTreeSet::new());
        }
        let mut all = head(seconds as i32, micros as i32, pvmmytid.load(Relaxed));
        all.extend(items);
        let mut out = Packer::new(Encoding::Xdr);
        let describe = self.described.insert(event);
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
        tell(self.sink, ENC_XDR, out.finish());
    }
}

fn tell((tid, ctx, tag): (i32, i32, i32), enc: i32, body: bytes::Bytes) {
    // The lock of the session is free here: records are made before and after a call, never in the middle.
    if let Some(rt) = session::lock().connected() {
        let message = Message {
            src: rt.tid(),
            dst: Tid::from_raw(tid),
            ctx,
            tag,
            wid: 0,
            enc,
            body,
        };
        // A tracer that cannot be told any more misses the record; the program goes on.
        let _ = rt.send(message);
    }
}

/// Sends what was collected: the sums when only those are wanted.
pub(crate) fn flush() {
    let mut state = state();
    if has_tracer() && !state.sums.is_empty() {
        let timing = pvmtrc.trace_opt.load(Relaxed) == TIME;
        let sums = std::mem::take(&mut state.sums);
        let names = sums
            .keys()
            .map(|event| event_name(*event).to_vec())
            .collect();
        let mut items = vec![int("VCT", sums.len() as i32), texts("VID", names)];
        if timing {
            items.push(ints(
                "TGS",
                sums.values()
                    .map(|sum| (sum.micros / 1_000_000) as i32)
                    .collect(),
            ));
            items.push(ints(
                "TGU",
                sums.values()
                    .map(|sum| (sum.micros % 1_000_000) as i32)
                    .collect(),
            ));
        }
        items.push(ints("PRF", sums.values().map(|sum| sum.count).collect()));
        let name = if timing { "timing" } else { "profiling" };
        let number = EventMask::event(name).map_or(0, |number| number as i32);
        state.append(name, number, process::clock(), items);
    }
    if !state.collected.is_empty() {
        let group = pvmtrc.trace_buf.load(Relaxed) > 0
            && !matches!(pvmtrc.trace_opt.load(Relaxed), TIME | COUNT);
        state.send(group);
    }
}

fn event_name(number: i32) -> &'static [u8] {
    let name = usize::try_from(number)
        .ok()
        .and_then(|at| libpvm::trace_events::EVENTS.get(at));
    name.map_or(b"?".as_slice(), |name| name.to_bytes())
}

/// A user's own event: goes to the tracer when that wants such.
pub(crate) fn user_event(body: &[u8]) {
    if number_if_wanted("user_defined").is_none() {
        return;
    }
    let mut out = Packer::new(Encoding::Xdr);
    out.append_encoded(body).int(USER_EVENT_END);
    let sink =
        [&pvmtrc.trace_tid, &pvmtrc.trace_ctx, &pvmtrc.trace_tag].map(|place| place.load(Relaxed));
    tell((sink[0], sink[1], sink[2]), ENC_TRACE, out.finish());
}
