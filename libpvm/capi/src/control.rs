//! Control messages between the libraries of tasks (`TC_*`).
//!
//! Control messages have their own message context, so the program never receives them.

use crate::abi::Tracer;
use crate::data::{pvmnsibs, pvmtrc};
use crate::output;
use crate::session;
use libpvm::Runtime;
use sempa_proto::body::{Encoding, Packer, Unpacker};
use sempa_proto::message::{CTX_TASK_CONTROL, ENC_XDR};
use sempa_proto::task::{Request, Sink};
use sempa_proto::{Message, PvmResult, Tid};
use std::sync::atomic::Ordering::Relaxed;

const TC_BASE: i32 = 0x8003_0001_u32 as i32;
const TC_CONREQ: i32 = TC_BASE;
const TC_CONACK: i32 = TC_BASE + 1;
const TC_TASKEXIT: i32 = TC_BASE + 2;
pub(crate) const TC_NOOP: i32 = TC_BASE + 3;
/// Output of a child, sent to the task that catches it.
pub(crate) const TC_OUTPUT: i32 = TC_BASE + 4;
pub(crate) const TC_SETTRACE: i32 = TC_BASE + 5;
pub(crate) const TC_SETTMASK: i32 = TC_BASE + 6;
pub(crate) const TC_SETTRCBUF: i32 = TC_BASE + 7;
pub(crate) const TC_SETTRCOPT: i32 = TC_BASE + 8;
/// Tids of all tasks of one spawn, sent to each of these tasks.
pub(crate) const TC_SIBLINGS: i32 = TC_BASE + 11;

/// Tags that the library handles itself, in the order of their handler numbers. The length of this
/// list is the number of the program's first handler.
pub(crate) const LIBRARY_HANDLED_TAGS: [i32; 9] = [
    TC_CONREQ,
    TC_CONACK,
    TC_TASKEXIT,
    TC_NOOP,
    TC_SETTRACE,
    TC_SETTRCBUF,
    TC_SETTRCOPT,
    TC_SETTMASK,
    TC_SIBLINGS,
];

/// Handles a control message. A malformed message is dropped, since no sender waits for a reply.
pub(crate) fn handle_control_message(rt: &Runtime, message: &Message) {
    let body = Unpacker::xdr(message.body.clone());
    match message.tag {
        TC_OUTPUT => output::handle_message(body),
        TC_SIBLINGS => drop(set_siblings(body)),
        TC_SETTRACE => drop(set_trace(rt, body)),
        TC_SETTMASK => drop(set_mask(body)),
        TC_SETTRCBUF => drop(set_int(body, |tracer, value| {
            tracer.trace_buf.store(value, Relaxed)
        })),
        TC_SETTRCOPT => drop(set_int(body, |tracer, value| {
            tracer.trace_opt.store(value, Relaxed)
        })),
        // The other control messages set up links between tasks in PVM; Sempa's links do not need
        // them.
        _ => (),
    }
}

fn set_siblings(mut body: Unpacker) -> PvmResult<()> {
    let count = body.int()?;
    let tids: Vec<Tid> = body.ints(count)?.into_iter().map(Tid::from_raw).collect();
    pvmnsibs.store(count, Relaxed);
    session::lock().siblings = Some(tids);
    Ok(())
}

fn set_mask(mut body: Unpacker) -> PvmResult<()> {
    pvmtrc.set_mask(&body.str()?);
    Ok(())
}

fn set_int(mut body: Unpacker, set: impl FnOnce(&Tracer, i32)) -> PvmResult<()> {
    set(&pvmtrc, body.int()?);
    Ok(())
}

fn set_trace(rt: &Runtime, mut body: Unpacker) -> PvmResult<()> {
    let mut words = [0; 6];
    for word in &mut words {
        *word = body.int()?;
    }
    let mask = body.str()?;
    let [trace_tid, trace_ctx, trace_tag, out_tid, out_ctx, out_tag] = words;
    let sink = Sink {
        tid: Tid::from_raw(out_tid),
        ctx: out_ctx,
        tag: out_tag,
    };
    crate::trace::flush();
    let trace = Sink {
        tid: Tid::from_raw(trace_tid.max(0)),
        ctx: trace_ctx,
        tag: trace_tag,
    };
    let old_out_tid = pvmtrc.out_tid.swap(out_tid, Relaxed);
    pvmtrc.out_ctx.store(out_ctx, Relaxed);
    pvmtrc.out_tag.store(out_tag, Relaxed);
    pvmtrc.trace_tid.store(trace_tid, Relaxed);
    pvmtrc.trace_ctx.store(trace_ctx, Relaxed);
    pvmtrc.trace_tag.store(trace_tag, Relaxed);
    pvmtrc.set_mask(&mask);
    pvmtrc.trace_buf.store(body.int()?, Relaxed);
    pvmtrc.trace_opt.store(body.int()?, Relaxed);
    // The sender is not notified of a failure. The daemon's own records then keep their old
    // destination.
    let _ = rt.request(Request::SetTrace(trace));
    if old_out_tid > 0 || out_tid > 0 {
        // The sender is not notified of a failure. The output then keeps its old destination.
        let _ = rt.request(Request::SetOutput(sink));
    }
    Ok(())
}

/// Sends the tids of a spawn to each of its tasks.
pub(crate) fn send_siblings(rt: &Runtime, tids: &[Tid]) {
    let mut body = Packer::new(Encoding::Xdr);
    body.int(tids.len() as i32)
        .items(tids.iter().map(|tid| tid.raw()));
    let body = body.finish();
    for dst in tids {
        // A send fails only for a task that has already exited, which needs no siblings.
        let _ = rt.send(Message {
            src: rt.tid(),
            dst: *dst,
            ctx: CTX_TASK_CONTROL,
            tag: TC_SIBLINGS,
            wid: 0,
            enc: ENC_XDR,
            body: body.clone(),
        });
    }
}
