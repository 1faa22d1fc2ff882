//! Drainer thread: reads the rings of this task while the application computes. A peer on the same
//! host wakes the drainer thread when a ring is full.
//!
//! The thread starts with the first ring, blocks all signals, and sleeps on a futex in the task's
//! doorbell.

use super::shared::Shared;
use sempa_proto::Micros;
use sempa_ring::futex;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Stack size of the drainer thread. Small, because the stack is transferred with every migration.
const STACK_BYTES: usize = 128 << 10;
/// Maximum interval between two reads of all rings while peers wake the thread. A peer that
/// violates the protocol can suppress a wake-up, or clear the bit that selects the ring to read.
const ACTIVE_SLEEP_MAX: Duration = Duration::from_secs(1);
/// Maximum sleep while no peer wakes the thread. Each wake-up disturbs a CPU that may be idle.
const IDLE_SLEEP_MAX: Duration = Duration::from_secs(8);

/// Starts the drainer thread. The caller must have blocked all signals.
pub(super) fn start(shared: &Arc<Shared>) -> io::Result<JoinHandle<()>> {
    let shared = Arc::clone(shared);
    std::thread::Builder::new()
        .name("pvm-ear".into())
        .stack_size(STACK_BYTES)
        .spawn(move || run_drainer(&shared))
}

fn run_drainer(shared: &Shared) {
    sempa_socket::request_short_slice();
    let bell = shared.doorbell();
    let (mut woken, mut all_polled_at, mut sleep) = (true, Micros(0), ACTIVE_SLEEP_MAX);
    while !shared.is_stopped() {
        bell.accept_drainer_request();
        {
            let mut state = shared.lock();
            let now = state.now();
            if woken && now.since(all_polled_at).0 < ACTIVE_SLEEP_MAX.as_micros() as u64 {
                state.core.poll_rings(now);
            } else {
                state.core.poll_all_rings(now);
                all_polled_at = now;
            }
            state.core.pump_rings(now);
            state.write_outbox();
        }
        futex::wait(bell.drainer_word(), 0, Some(sleep));
        woken = bell.is_drainer_requested();
        sleep = if woken {
            ACTIVE_SLEEP_MAX
        } else {
            (sleep * 2).min(IDLE_SLEEP_MAX)
        };
    }
}
