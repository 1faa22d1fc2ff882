//! The ear: a thread that peers on the same host call when a ring is full, while the application computes.
//!
//! It exists from the first ring on, blocks all signals, and sleeps on a word of the task's bell.

use super::shared::Shared;
use sempa_proto::Micros;
use sempa_ring::futex;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Stack of the ear: small, because it travels with every move.
const STACK_BYTES: usize = 128 << 10;
/// It looks everywhere at least as often while it is called: a peer that breaks the rules can swallow a call, or take back what
/// says where to look.
const NAP_MAX: Duration = Duration::from_secs(1);
/// Longest sleep when nobody has called for as long as that: each wakes a processor that may have nothing else to do.
const LONG_NAP: Duration = Duration::from_secs(8);

/// Starts the ear; to be called by a thread with all signals blocked.
pub(super) fn start(shared: &Arc<Shared>) -> io::Result<JoinHandle<()>> {
    let shared = Arc::clone(shared);
    std::thread::Builder::new()
        .name("pvm-ear".into())
        .stack_size(STACK_BYTES)
        .spawn(move || run(&shared))
}

fn run(shared: &Shared) {
    sempa_socket::take_short_turns();
    let bell = shared.listening();
    let (mut called, mut looked, mut nap) = (true, Micros(0), NAP_MAX);
    while !shared.is_stopped() {
        bell.take_call();
        {
            let mut state = shared.lock();
            let now = state.now();
            if called && now.since(looked).0 < NAP_MAX.as_micros() as u64 {
                state.core.look(now);
            } else {
                state.core.look_everywhere(now);
                looked = now;
            }
            state.core.pump_rings(now);
            state.flush();
        }
        futex::wait(bell.ear(), 0, Some(nap));
        called = bell.is_called();
        nap = if called {
            NAP_MAX
        } else {
            (nap * 2).min(LONG_NAP)
        };
    }
}
