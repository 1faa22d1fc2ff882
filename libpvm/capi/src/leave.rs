//! Leaves the virtual machine (`pvm_exit`).

use crate::control;
use crate::data::pvmmyctx;
use crate::memory::flush_stdio;
use crate::receive;
use crate::requests;
use crate::session::{self, Session};
use crate::trace;
use libpvm::Runtime;
use std::sync::atomic::Ordering::Relaxed;

/// Leaves the virtual machine. The process continues to run, and its next call enrols the process
/// as a new task. If the process is not enrolled, the function only flushes standard I/O.
pub(crate) fn leave_vm() {
    let runtime = session::lock().connected_runtime();
    if let Some(rt) = runtime {
        wait_for_child_output(&rt);
        deliver_own_exit_notices(&rt);
        receive::take_in_all(&rt);
        let mut session = session::lock();
        discard_queued_messages(&mut session);
        drop(session);
        trace::send_collected_records();
    }
    flush_stdio();
    disconnect();
}

/// Disconnects from the daemon, without the other steps of [`leave_vm`].
pub(crate) fn disconnect() {
    let runtime = session::lock().reset_after_exit();
    if let Some(rt) = runtime {
        // An error means that the daemon has already ended, so the task is already disconnected.
        let _ = rt.exit();
        receive::forget_arrivals();
    }
}

/// Waits until the output of all children has ended, if this task prints that output.
fn wait_for_child_output(rt: &Runtime) {
    receive::take_in_all(rt);
    if !session::lock().output_catcher.has_running_children() {
        return;
    }
    session::log_stderr("child task(s) still running.  waiting...\n", false);
    loop {
        let unwatched_children = session::lock().output_catcher.take_unwatched();
        if !unwatched_children.is_empty() {
            // A child that is lost with its host does not end its output.
            control::watch_exits(rt, control::TC_WRITER_EXIT, unwatched_children);
        }
        let wait_result = receive::wait_until(rt, |session| {
            let catcher = &session.output_catcher;
            let has_ended = !catcher.has_running_children();
            (has_ended || catcher.has_unwatched()).then_some(has_ended)
        });
        // An error means that the daemon has ended, so no more output can arrive.
        if wait_result != Ok(false) {
            return;
        }
    }
}

/// Delivers the exit notices that this task requested about itself.
fn deliver_own_exit_notices(rt: &Runtime) {
    let notices = std::mem::take(&mut session::lock().own_exit_notices);
    for (ctx, tag) in notices {
        requests::notify_own_exit(rt, ctx, tag);
    }
}

/// Discards the unreceived messages of the current context; of all contexts if the current context
/// is −1.
fn discard_queued_messages(session: &mut Session) {
    let ctx = pvmmyctx.load(Relaxed);
    let queued_mids: Vec<i32> = session.receivable.mids_since(0).collect();
    for mid in queued_mids {
        if session
            .buffers
            .get(mid)
            .is_ok_and(|buffer| ctx == -1 || buffer.ctx == ctx)
        {
            // The call cannot fail: the buffer was found under the same lock.
            let _ = session.free_buffer(mid);
        }
    }
}
