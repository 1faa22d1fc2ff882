//! Waits of threads that have locked the state: awake, or asleep without the lock.

use super::super::socket_waiters::{DEADLINE_SLEEP_MAX, sleep_duration};
use super::StateGuard;
use sempa_proto::{Micros, Tid};
use sempa_ring::futex;
use sempa_socket::{SenderDistance, SpinBudget, WaitPlan, YIELDS_MAX, has_one_cpu};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Number of ring polls before the first reading of the clock. They take about a microsecond.
const FIRST_POLLS: u32 = 128;
/// Number of ring polls between two readings of the clock.
const POLLS_PER_CLOCK_READ: u32 = 32;
/// Time for which a sender to a full ring waits while the reader frees no space.
const RING_SPACE_TIMEOUT: Duration = Duration::from_micros(50);
/// Minimum duration of a wait that sleeps on the socket, because socket timeouts have millisecond
/// resolution. Shorter waits use the futex.
const SOCKET_WAIT_MIN: Duration = Duration::from_millis(10);

/// Minimum duration of a sleep after which the next message will not arrive soon either.
const LONG_SLEEP_MIN: Micros = Micros::from_millis(2);

/// Event with which a spin ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SpinEnd {
    /// Any event for which a thread may wait. Records in rings are read.
    Event,
    /// A record in a ring, which stays there.
    RingRecord,
}

impl StateGuard<'_> {
    /// Spins for a short time if recent spins were successful. Returns true if there is an event,
    /// or if other threads are blocked on the lock.
    ///
    /// If an event has just woken this thread, this call finds the event at once, and the spin
    /// counts as a success, except after a long sleep. The thread thus spins once more after each
    /// message. If many peers send in turn, this spin rarely receives the next message, but it
    /// keeps the CPU from entering an idle state. Waking a thread on an idle CPU takes longer than
    /// a peer needs for its answer.
    pub(crate) fn spin_for_event(&mut self, timeout: Option<Duration>) -> bool {
        self.spin(timeout, SpinEnd::Event)
    }

    /// As [`StateGuard::spin_for_event`] without a time limit, but leaves the records in the rings.
    /// Returns true if a ring may have a record, and false at once if the records must be read in
    /// the ordinary way.
    pub(crate) fn spin_for_ring_record(&mut self) -> bool {
        self.core.receives_at_once()
            && self.core.direct_routes.is_empty()
            && self.spin(None, SpinEnd::RingRecord)
    }

    fn spin(&mut self, timeout: Option<Duration>, end: SpinEnd) -> bool {
        if self.core.shm_routes.is_empty() && self.core.direct_routes.is_empty() {
            return false;
        }
        let sender_distance = if self.core.direct_routes.is_empty() {
            SenderDistance::Host
        } else {
            SenderDistance::RemoteTasks
        };
        // The peer that must answer last ran on this CPU. The thread therefore yields the CPU to
        // the peer immediately, or does not spin at all.
        let shares_cpu = self.core.shm_routes.shares_cpu();
        let spin_budget = &mut self.spin_budget;
        let plan = spin_budget.plan_wait(timeout, sender_distance, shares_cpu, has_one_cpu);
        if plan != WaitPlan::Sleep && self.core.shm_routes.has_deferred_wakes() {
            self.take_peer_wakes().wake_all();
        }
        let budget = match plan {
            WaitPlan::Sleep => return false,
            WaitPlan::Yield => return self.yield_for_event(end),
            WaitPlan::Spin(budget) => budget,
        };
        let mut poll_count = if shares_cpu { 1 } else { FIRST_POLLS };
        let (mut spin_start, previous_event_seq) = (None, self.core.event_seq());
        loop {
            for _ in 0..poll_count {
                if self.has_reached(end, previous_event_seq) {
                    // The start time is not set if the first round found the event. That round
                    // takes negligible time.
                    let spin_time = spin_start
                        .map_or(Duration::ZERO, |spin_start: Instant| spin_start.elapsed());
                    self.spin_budget.record_spin(spin_time, budget);
                    return true;
                }
                if self.shared_state.lock_waiter_count.load(Ordering::Relaxed) != 0 {
                    self.yield_lock();
                    return true;
                }
                // The answer to a small message arrives in the first round. A pause takes as long
                // as several polls.
                if spin_start.is_some() {
                    std::hint::spin_loop();
                }
            }
            let spin_start = *spin_start.get_or_insert_with(Instant::now);
            poll_count = poll_count.min(POLLS_PER_CLOCK_READ);
            self.spin_budget.yield_cpu();
            let now = self.now();
            if self.poll_direct_routes(now) && self.core.event_seq() != previous_event_seq {
                self.spin_budget.record_spin(spin_start.elapsed(), budget);
                return true;
            }
            if spin_start.elapsed() >= budget {
                self.spin_budget.record_miss();
                return false;
            }
        }
    }

    /// True if a spin ends now. Reads the rings, except if the spin ends with a record in a ring.
    #[inline]
    fn has_reached(&mut self, end: SpinEnd, previous_event_seq: u64) -> bool {
        if !self.core.must_poll_rings() {
            return false;
        }
        if end == SpinEnd::Event {
            let now = self.clock.coarse_now();
            self.core.poll_rings(now);
            return self.core.event_seq() != previous_event_seq;
        }
        true
    }

    /// Yields the CPU to the peer that must answer, a few times. Returns true if the spin ends, or
    /// if other threads are blocked on the lock.
    fn yield_for_event(&mut self, end: SpinEnd) -> bool {
        let previous_event_seq = self.core.event_seq();
        for yield_count in 0..=YIELDS_MAX {
            if yield_count > 0 {
                self.spin_budget.yield_cpu();
            }
            if self.has_reached(end, previous_event_seq) {
                // A message that was there before the first yield proves nothing.
                if yield_count > 0 {
                    self.spin_budget.record_yields(yield_count - 1);
                }
                return true;
            }
            if self.shared_state.lock_waiter_count.load(Ordering::Relaxed) != 0 {
                self.yield_lock();
                return true;
            }
        }
        self.spin_budget.record_yields(YIELDS_MAX);
        false
    }

    /// Makes threads of this task sleep immediately when they wait.
    pub(crate) fn disable_spinning(&mut self) {
        self.spin_budget = SpinBudget::without_spinning();
    }

    /// Releases the lock for the threads that are blocked on the lock, and then acquires the lock
    /// again.
    fn yield_lock(&mut self) {
        self.release_and_wake();
        std::thread::yield_now();
        self.relock();
    }

    fn relock(&mut self) {
        let state = self.shared_state.lock_as_counted_waiter();
        (
            self.seen_event_seq,
            self.seen_output_counters,
            self.was_connected,
        ) = StateGuard::change_counters(&state);
        self.state = Some(state);
    }

    /// Called after a send to a full ring. Waits for space, and writes the queued frames while the
    /// reader keeps reading. If the reader stops reading, returns and leaves the frames queued.
    pub(crate) fn wait_for_ring_space(&mut self, peer: Tid) {
        if !self.core.is_ring_full_for(peer) {
            return;
        }
        let mut last_progress_at = Instant::now();
        while self.core.is_ring_full_for(peer) {
            let now = self.now();
            if self.core.pump_one_ring(now, peer) {
                last_progress_at = Instant::now();
            } else if last_progress_at.elapsed() > RING_SPACE_TIMEOUT {
                return;
            } else if self.shared_state.lock_waiter_count.load(Ordering::Relaxed) != 0 {
                self.yield_lock();
            } else {
                self.take_peer_wakes().wake_all();
                std::thread::yield_now();
            }
        }
    }

    /// Sleeps until the next event, for at most `timeout`.
    pub(crate) fn wait_for_event(&mut self, timeout: Option<Duration>) {
        self.update_ready_fd();
        if self.will_wait_at_socket(timeout) {
            return self.wait_at_socket(sleep_duration(timeout));
        }
        let sleep_word_value = self.shared_state.doorbell.get().prepare_sleep();
        let (now, previous_event_seq) = (self.now(), self.core.event_seq());
        self.core.poll_rings_before_sleep(now);
        // While this thread sleeps, the I/O thread watches the direct routes.
        self.core.direct_routes.record_polling(None);
        // This thread may sleep for a long time, so it first wakes other threads for the changes
        // that it made under the lock.
        let wake_set = self.wake_set();
        let peer_wakes = self.take_peer_wakes();
        if self.core.event_seq() != previous_event_seq {
            return StateGuard::wake_threads(self.shared_state, wake_set, peer_wakes);
        }
        self.event_waiter_count += 1;
        drop(self.state.take());
        StateGuard::wake_threads(self.shared_state, wake_set, peer_wakes);
        futex::wait(
            self.shared_state.doorbell.get().sleep_word(),
            sleep_word_value,
            Some(sleep_duration(timeout)),
        );
        self.relock();
        self.event_waiter_count -= 1;
        let sleep_time = self.now().since(now);
        if sleep_time >= LONG_SLEEP_MIN {
            self.spin_budget.record_long_sleep();
        } else {
            let sleep_time = Duration::from_micros(sleep_time.0);
            self.spin_budget.record_sleep(sleep_time);
        }
    }

    /// True if a thread that waits now for at most `timeout` sleeps on the sockets.
    fn will_wait_at_socket(&self, timeout: Option<Duration>) -> bool {
        let expects_message_at_socket =
            self.core.shm_routes.is_empty() || !self.core.shm_routes.expects_ring_message();
        expects_message_at_socket
            && !self.has_socket_waiter
            && self.can_wait_at_socket()
            && sleep_duration(timeout) >= SOCKET_WAIT_MIN
    }

    /// Handles what has arrived before this thread waits for at most `timeout`. With direct routes
    /// the wait itself begins with a look at all sockets, so that one is saved here. If this thread
    /// will sleep on the doorbell, the I/O thread reads the daemon's socket meanwhile.
    pub(crate) fn poll_before_wait(&mut self, timeout: Option<Duration>) {
        let has_direct_route = !self.core.direct_routes.is_empty();
        let will_wait_at_socket = self.will_wait_at_socket(timeout);
        let reads_sockets_later = if will_wait_at_socket {
            has_direct_route
        } else {
            !has_direct_route && timeout.is_none() && !self.core.shm_routes.is_empty()
        };
        if !reads_sockets_later {
            return self.poll_incoming();
        }
        let now = self.now();
        self.core.poll_rings(now);
    }

    /// Sleeps until the next event, which is most likely the daemon's reply to a request.
    pub(crate) fn wait_for_reply(&mut self) {
        if self.has_socket_waiter || !self.can_wait_at_socket() {
            return self.wait_for_event(None);
        }
        self.update_ready_fd();
        self.wait_at_socket(DEADLINE_SLEEP_MAX);
    }

    /// Sleeps until the daemon's socket or a direct connection is readable, until the drainer
    /// thread has read a ring, or for at most `timeout`. Then reads what is readable.
    fn wait_at_socket(&mut self, timeout: Duration) {
        let shared_state = self.shared_state;
        let doorbell = shared_state.doorbell();
        doorbell.set_notify_always(true);
        let (now, previous_event_seq) = (self.now(), self.core.event_seq());
        self.core.poll_rings_before_sleep(now);
        self.core.direct_routes.record_sleeping_app_thread(true);
        let (wake_set, peer_wakes) = (self.wake_set(), self.take_peer_wakes());
        let has_new_event = self.core.event_seq() != previous_event_seq;
        self.has_socket_waiter = !has_new_event;
        if !has_new_event {
            drop(self.state.take());
        }
        StateGuard::wake_threads(shared_state, wake_set, peer_wakes);
        if !has_new_event {
            let ready = shared_state.socket_waiters.wait_for_sockets(timeout);
            self.relock();
            self.has_socket_waiter = false;
            self.read_ready_sockets(ready);
        }
        self.core.direct_routes.record_sleeping_app_thread(false);
        doorbell.set_notify_always(shared_state.ready_event.get().is_some());
    }

    /// Sleeps until bytes have been written or the connection has changed, for at most `timeout`.
    pub(crate) fn wait_until_written(&mut self, timeout: Option<Duration>) {
        self.update_ready_fd();
        let (wake_set, peer_wakes) = (self.wake_set(), self.take_peer_wakes());
        StateGuard::wake_threads(self.shared_state, wake_set, peer_wakes);
        self.write_waiter_count += 1;
        // Threads that write later see this thread counted, because they lock the state.
        let event_count = self.shared_state.write_event_count.load(Ordering::Relaxed);
        drop(self.state.take());
        futex::wait(
            &self.shared_state.write_event_count,
            event_count,
            Some(sleep_duration(timeout)),
        );
        self.relock();
        self.write_waiter_count -= 1;
    }
}
