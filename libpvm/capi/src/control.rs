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
use sempa_proto::task::{NotifyRequest, NotifySubjects, Request, Sink};
use sempa_proto::{Message, PvmResult, Tid};
use std::sync::atomic::Ordering::Relaxed;

const TC_BASE: i32 = 0x8003_0001_u32 as i32;
const TC_CONREQ: i32 = TC_BASE;
const TC_CONACK: i32 = TC_BASE + 1;
const TC_TASKEXIT: i32 = TC_BASE + 2;
pub(crate) const TC_NOOP: i32 = TC_BASE + 3;
/// Output of a child, sent to the task that prints it.
pub(crate) const TC_OUTPUT: i32 = TC_BASE + 4;
pub(crate) const TC_SETTRACE: i32 = TC_BASE + 5;
pub(crate) const TC_SETTMASK: i32 = TC_BASE + 6;
pub(crate) const TC_SETTRCBUF: i32 = TC_BASE + 7;
pub(crate) const TC_SETTRCOPT: i32 = TC_BASE + 8;
/// List of the tids of all tasks of one spawn, sent to each of these tasks.
pub(crate) const TC_SIBLINGS: i32 = TC_BASE + 11;

/// Notification of the exit of a child whose output this task prints. Not a tag of PVM.
pub(crate) const TC_WRITER_EXIT: i32 = TC_BASE + 100;
/// Notification of the exit of the parent, which has sent no list of siblings. Not a tag of PVM.
pub(crate) const TC_PARENT_EXIT: i32 = TC_BASE + 101;

/// Tags that the library handles itself, in the order of their handler numbers. The length of the
/// array is the number of the program's first handler.
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

/// True for the library's own notifications, which PVM does not have. A program must not notice
/// that a call takes them in.
pub(crate) fn is_unknown_to_pvm(message: &Message) -> bool {
    message.ctx == CTX_TASK_CONTROL && [TC_WRITER_EXIT, TC_PARENT_EXIT].contains(&message.tag)
}

/// Handles a control message. A malformed message is dropped, since no sender waits for a reply.
pub(crate) fn handle_control_message(rt: &Runtime, message: &Message) {
    let body = Unpacker::new_xdr(message.body.clone());
    match message.tag {
        TC_OUTPUT => output::handle_output_message(body),
        TC_WRITER_EXIT if message.src.is_daemon() => output::handle_child_exit(body),
        TC_SIBLINGS => drop(set_siblings(body)),
        TC_PARENT_EXIT if message.src.is_daemon() => session::lock().has_parent_exited = true,
        TC_SETTRACE => drop(set_trace(rt, body)),
        TC_SETTMASK => drop(set_mask(body)),
        TC_SETTRCBUF => drop(set_tracer_int(body, |tracer, value| {
            tracer.trace_buf.store(value, Relaxed)
        })),
        TC_SETTRCOPT => drop(set_tracer_int(body, |tracer, value| {
            tracer.trace_opt.store(value, Relaxed)
        })),
        // In PVM the remaining control messages set up links between tasks. Sempa's links do not
        // need these messages.
        _ => (),
    }
}

fn set_siblings(mut body: Unpacker) -> PvmResult<()> {
    let count = body.read_int()?;
    let tids: Vec<Tid> = body
        .read_ints(count)?
        .into_iter()
        .map(Tid::from_raw)
        .collect();
    pvmnsibs.store(count, Relaxed);
    session::lock().siblings = Some(tids);
    Ok(())
}

fn set_mask(mut body: Unpacker) -> PvmResult<()> {
    pvmtrc.set_mask(&body.read_str()?);
    Ok(())
}

fn set_tracer_int(mut body: Unpacker, set_field: impl FnOnce(&Tracer, i32)) -> PvmResult<()> {
    set_field(&pvmtrc, body.read_int()?);
    Ok(())
}

fn set_trace(rt: &Runtime, mut body: Unpacker) -> PvmResult<()> {
    let mut sink_fields = [0; 6];
    for field in &mut sink_fields {
        *field = body.read_int()?;
    }
    let mask = body.read_str()?;
    let [trace_tid, trace_ctx, trace_tag, out_tid, out_ctx, out_tag] = sink_fields;
    let output_sink = Sink {
        tid: Tid::from_raw(out_tid),
        ctx: out_ctx,
        tag: out_tag,
    };
    crate::trace::send_collected_records();
    let trace_sink = Sink {
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
    pvmtrc.trace_buf.store(body.read_int()?, Relaxed);
    pvmtrc.trace_opt.store(body.read_int()?, Relaxed);
    // The sender is not notified of a failure. After a failure, the daemon still sends its own
    // trace records to the old destination.
    let _ = rt.request_and_wait(Request::SetTrace(trace_sink));
    if old_out_tid > 0 || out_tid > 0 {
        // The sender is not notified of a failure. After a failure, the output is still sent to the
        // old destination.
        let _ = rt.request_and_wait(Request::SetOutput(output_sink));
    }
    Ok(())
}

/// Requests a notification with a tag of this module for the exit of each of these tasks.
///
/// An error means that the connection to the daemon is lost, or that the task has requested too
/// many notifications; the caller then waits without this notification.
pub(crate) fn watch_exits(rt: &Runtime, tag: i32, tids: Vec<Tid>) {
    let _ = rt.request_and_wait(Request::Notify(NotifyRequest {
        subjects: NotifySubjects::TaskExit(tids),
        ctx: CTX_TASK_CONTROL,
        tag,
        is_cancellation: false,
    }));
}

/// Sends the tids of a spawn to each of its tasks.
pub(crate) fn send_siblings(rt: &Runtime, tids: &[Tid]) {
    let mut body = Packer::new(Encoding::Xdr);
    body.pack_int(tids.len() as i32)
        .pack_items(tids.iter().map(|tid| tid.raw()));
    let body = body.finish();
    for dst in tids {
        // The send fails only if the task has already exited; such a task needs no siblings.
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
