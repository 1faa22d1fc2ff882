//! Leaving the virtual machine (`pvm_exit`).

use crate::ask;
use crate::data::pvmmyctx;
use crate::memory::flush_stdio;
use crate::receive;
use crate::session::{self, Session};
use crate::trace;
use libpvm::Runtime;
use sempa_proto::PvmResult;
use std::sync::atomic::Ordering::Relaxed;

/// Leaves in good order; the process lives on, and another call makes it a new task. A process that is no task has
/// nothing to leave.
pub(crate) fn exit() {
    let connected = session::lock().connected();
    if let Some(rt) = connected {
        wait_for_children(&rt);
        tell_own_exit(&rt);
        receive::pump(&rt);
        let mut session = session::lock();
        discard(&mut session);
        drop(session);
        trace::flush();
    }
    flush_stdio();
    end();
}

/// Lets go of the daemon, without the rest of [`exit`].
pub(crate) fn end() {
    let runtime = session::lock().forget();
    if let Some(rt) = runtime {
        // The daemon may be gone already: then there is nothing left to leave.
        let _ = rt.exit();
    }
}

/// A task that prints its children's output stays until they are silent.
fn wait_for_children(rt: &Runtime) {
    receive::pump(rt);
    if !session::lock().catch.waits() {
        return;
    }
    session::say("child task(s) still running.  waiting...\n", false);
    // Without the daemon no more output can come.
    let _: PvmResult<()> = receive::wait_for(rt, |session| (!session.catch.waits()).then_some(()));
}

/// The task asked to be told of its own end: this is the moment.
fn tell_own_exit(rt: &Runtime) {
    let asked = std::mem::take(&mut session::lock().own_exit);
    for (ctx, tag) in asked {
        ask::tell_own_exit(rt, ctx, tag);
    }
}

/// Drops what waits to be received in the current context.
fn discard(session: &mut Session) {
    let ctx = pvmmyctx.load(Relaxed);
    let waiting: Vec<i32> = session.arrived.iter().copied().collect();
    for mid in waiting {
        if session
            .buffers
            .get(mid)
            .is_ok_and(|buffer| ctx == -1 || buffer.ctx == ctx)
        {
            // It is there: it was found a moment ago under the same lock.
            let _ = session.free(mid);
        }
    }
}
