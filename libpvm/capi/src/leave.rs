//! Leaves the virtual machine (`pvm_exit`).

use crate::data::pvmmyctx;
use crate::memory::flush_stdio;
use crate::receive;
use crate::requests;
use crate::session::{self, Session};
use crate::trace;
use libpvm::Runtime;
use sempa_proto::PvmResult;
use std::sync::atomic::Ordering::Relaxed;

/// Leaves the virtual machine. The process continues to run, and its next call enrols it as a new
/// task. For a process that is not enrolled, only flushes standard I/O.
pub(crate) fn leave_vm() {
    let connected = session::lock().connected_runtime();
    if let Some(rt) = connected {
        wait_for_child_output(&rt);
        deliver_own_exit_notices(&rt);
        receive::poll_incoming(&rt);
        let mut session = session::lock();
        discard_queued(&mut session);
        drop(session);
        trace::flush();
    }
    flush_stdio();
    disconnect();
}

/// Disconnects from the daemon, without the other steps of [`leave_vm`].
pub(crate) fn disconnect() {
    let runtime = session::lock().reset();
    if let Some(rt) = runtime {
        // An error means that the daemon has already ended, so the task is already disconnected.
        let _ = rt.exit();
    }
}

/// Waits for the end of the children's output if this task prints it.
fn wait_for_child_output(rt: &Runtime) {
    receive::poll_incoming(rt);
    if !session::lock().output_catcher.has_running_children() {
        return;
    }
    session::log_stderr("child task(s) still running.  waiting...\n", false);
    // An error means that the daemon has ended; no more output can arrive then.
    let _: PvmResult<()> = receive::wait_until(rt, |session| {
        (!session.output_catcher.has_running_children()).then_some(())
    });
}

/// Delivers the exit notices that this task requested about itself.
fn deliver_own_exit_notices(rt: &Runtime) {
    let requested = std::mem::take(&mut session::lock().own_exit_notices);
    for (ctx, tag) in requested {
        requests::notify_own_exit(rt, ctx, tag);
    }
}

/// Discards the unreceived messages of the current context.
fn discard_queued(session: &mut Session) {
    let ctx = pvmmyctx.load(Relaxed);
    let waiting: Vec<i32> = session.receivable.iter().copied().collect();
    for mid in waiting {
        if session
            .buffers
            .get(mid)
            .is_ok_and(|buffer| ctx == -1 || buffer.ctx == ctx)
        {
            // Cannot fail: the buffer was found under the same lock.
            let _ = session.free_buffer(mid);
        }
    }
}
