//! Drainer thread: reads the rings of this task while the application computes. A peer on the same
//! host wakes the drainer thread when a ring is full.
//!
//! The thread starts with the first ring, blocks all signals, and sleeps on a futex in the task's
//! doorbell.

use super::shared::SharedState;
use sempa_proto::Micros;
use sempa_ring::futex;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Stack size of the drainer thread. Small, because the stack is transferred with every migration.
const STACK_BYTES: usize = 128 << 10;
/// Maximum interval between two reads of all rings while peers wake the thread. The limit is
/// necessary because a peer that violates the protocol can suppress a wake-up, or clear the bit
/// that selects the ring to read.
const ACTIVE_SLEEP_MAX: Duration = Duration::from_secs(1);
/// Maximum sleep while no peer wakes the thread. The limit is high because each wake-up disturbs a
/// CPU that may be idle.
const IDLE_SLEEP_MAX: Duration = Duration::from_secs(8);

/// Starts the drainer thread. The caller must have blocked all signals.
pub(super) fn start(shared_state: &Arc<SharedState>) -> io::Result<JoinHandle<()>> {
    let shared_state = Arc::clone(shared_state);
    std::thread::Builder::new()
        .name("pvm-ear".into())
        .stack_size(STACK_BYTES)
        .spawn(move || run_drainer(&shared_state))
}

fn run_drainer(shared_state: &SharedState) {
    sempa_socket::request_short_slice();
    let doorbell = shared_state.doorbell();
    let (mut was_woken, mut full_poll_at, mut sleep_max) = (true, Micros(0), ACTIVE_SLEEP_MAX);
    while !shared_state.is_stop_requested() {
        doorbell.accept_drainer_request();
        {
            let mut state = shared_state.lock();
            let now = state.now();
            if was_woken && now.since(full_poll_at).0 < ACTIVE_SLEEP_MAX.as_micros() as u64 {
                state.core.poll_rings(now);
            } else {
                state.core.poll_all_rings(now);
                full_poll_at = now;
            }
            state.core.pump_rings(now);
            state.write_outbox();
        }
        futex::wait(doorbell.drainer_word(), 0, Some(sleep_max));
        was_woken = doorbell.is_drainer_requested();
        sleep_max = if was_woken {
            ACTIVE_SLEEP_MAX
        } else {
            (sleep_max * 2).min(IDLE_SLEEP_MAX)
        };
    }
}
