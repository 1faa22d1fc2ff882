//! Direct routes to tasks on other hosts: setup, reading, writing and teardown of the connections.
//!
//! Like a ring, a direct route is only a route of a link: it may end at any time, and the daemons
//! then carry the messages. [`Routes`] decides with which tasks to connect; this module carries the
//! decisions out.
//!
//! All sockets are in one epoll set, which the I/O thread watches while no thread spins on it.

use super::core::Core;
use super::direct::{Acceptor, Dialer, DirectEnd, NoRoute};
use super::process::Own;
use super::routes::{RouteEvent, RouteOutput, Routes};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use rustc_hash::FxHashMap;
use sempa_proto::body::{Encoding, Packer};
use sempa_proto::link::{LinkEvent, decode_short_head};
use sempa_proto::message::ENC_XDR;
use sempa_proto::route::{Fingerprint, OFFER_ADDRESSES_MAX, OfferId, RouteWord};
use sempa_proto::{Message, Micros, PvmResult, Tid};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// Maximum number of direct routes of one task.
pub(crate) const DIRECT_MAX: usize = 512;
/// Maximum number of ready descriptors handled in one poll.
const READY_MAX: usize = 64;
/// Event data of all descriptors of routes in setup.
const NEGOTIATION: u64 = u64::MAX;
/// Time for which the I/O thread does not watch the direct routes after another thread polled them.
pub(crate) const ATTENDED: Micros = Micros::from_millis(2);
/// Silence after which a connection that is only drained is closed.
pub(crate) const LAST_WORDS_SILENCE: Micros = Micros::from_secs(2);
/// Time after which a connection that is only drained is closed in any case.
pub(crate) const LAST_WORDS_WITHIN: Micros = Micros::from_secs(30);
/// Time without traffic after which a route frees its buffers.
const REST_AFTER: Micros = Micros::from_secs(60);
/// Interval of the check for idle routes.
const REST_LOOK: Micros = Micros::from_secs(10);
/// Absent certificate: tasks on one host need none.
const NOBODY: Fingerprint = [0; 32];

/// Connection of a direct route, with its state.
#[derive(Debug)]
struct Far {
    end: DirectEnd,
    /// Output is waiting until the socket becomes writable.
    blocked: bool,
    /// The last read left data in the socket.
    unread: bool,
    /// Set while the connection is drained: nothing is written, but what the peer sent is still
    /// read.
    last_words: Option<LastWords>,
    /// Time of the last traffic.
    used: Micros,
}

/// Time limits for draining a connection on which nothing can be written.
#[derive(Clone, Copy, Debug)]
struct LastWords {
    /// Time at which draining ends if nothing arrives.
    silent_until: Micros,
    until: Micros,
    /// The peer has ended. The rest of the task is notified when the connection has been drained.
    gone: bool,
}

/// Addresses and certificate of a peer that offers a route.
#[derive(Debug)]
struct Asking {
    addresses: Vec<SocketAddr>,
    fingerprint: Fingerprint,
}

/// Epoll set of all descriptors of the direct routes.
#[derive(Debug)]
pub(crate) struct ReadySet(Epoll);

impl AsFd for ReadySet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.0.as_fd()
    }
}

/// All direct routes of this task.
#[derive(Debug)]
pub(crate) struct Direct {
    pub(crate) routes: Routes,
    /// Addresses of this host.
    addresses: Vec<IpAddr>,
    acceptor: Acceptor,
    /// Peers to which this task's offers were sent.
    offered: FxHashMap<OfferId, Tid>,
    dialers: FxHashMap<Tid, Dialer>,
    /// Contents of the offer that is being handled.
    asking: Option<Asking>,
    /// Certificate of the acceptance that is being handled.
    accepting: Fingerprint,
    ends: FxHashMap<Tid, Far>,
    blocked: usize,
    /// Time of the next check for idle routes.
    rest_look: Option<Micros>,
    ready: Option<Arc<Own<ReadySet>>>,
    /// Time at which a spinning thread last polled the routes.
    attended: Option<Micros>,
}

impl Direct {
    /// Creates an empty set of routes.
    pub(crate) fn new(me: Tid, addresses: Vec<IpAddr>) -> Direct {
        Direct {
            routes: Routes::new(me),
            addresses,
            acceptor: Acceptor::default(),
            offered: FxHashMap::default(),
            dialers: FxHashMap::default(),
            asking: None,
            accepting: NOBODY,
            ends: FxHashMap::default(),
            blocked: 0,
            rest_look: None,
            ready: None,
            attended: None,
        }
    }

    /// Sets the addresses of the host, after a migration.
    pub(crate) fn set_addresses(&mut self, addresses: Vec<IpAddr>) {
        self.addresses = addresses;
    }

    /// True if there is a direct route to this peer.
    pub(crate) fn leads_to(&self, peer: Tid) -> bool {
        self.ends.contains_key(&peer)
    }

    /// True if there is no direct route.
    pub(crate) fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// True if messages to this peer wait for its socket.
    pub(crate) fn is_blocked(&self, peer: Tid) -> bool {
        self.ends.get(&peer).is_some_and(|far| far.blocked)
    }

    /// Returns the epoll set that the I/O thread must watch; `None` while another thread polls it.
    pub(crate) fn to_watch(&self, now: Micros) -> Option<Arc<Own<ReadySet>>> {
        let attended = self.attended.is_some_and(|at| now.since(at) < ATTENDED);
        self.ready.clone().filter(|_| !attended || self.has_work())
    }

    /// True if the I/O thread must watch the routes because no other thread does.
    pub(crate) fn must_be_watched(&self) -> bool {
        self.is_open() && (self.attended.is_none() || self.has_work())
    }

    /// True if there is work that a spinning thread does not do.
    fn has_work(&self) -> bool {
        self.blocked > 0 || !self.dialers.is_empty() || !self.acceptor.is_idle()
    }

    /// True if there are routes, or routes in setup.
    pub(crate) fn is_open(&self) -> bool {
        self.ready.is_some()
    }

    /// Records that a thread polls the routes itself, or (`None`) that it stops.
    pub(crate) fn attend(&mut self, now: Option<Micros>) {
        self.attended = now;
    }

    fn set(&mut self) -> Option<Arc<Own<ReadySet>>> {
        if self.ready.is_none() {
            let set = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).ok()?;
            self.ready = Some(Arc::new(Own::fd(ReadySet(set))));
        }
        self.ready.clone()
    }

    /// Adds all descriptors of routes in setup to the epoll set.
    fn watch_negotiations(&mut self) {
        let Some(set) = self.set() else { return };
        let mut fds: Vec<PollFd<'_>> = Vec::new();
        self.acceptor.watch(&mut fds);
        self.dialers
            .values()
            .for_each(|dialer| dialer.watch(&mut fds));
        for fd in &fds {
            watch(&set, fd.as_fd(), fd.events(), NEGOTIATION);
        }
    }
}

/// Adds a descriptor to the epoll set, or changes its events if it is in the set.
fn watch(set: &Own<ReadySet>, fd: BorrowedFd<'_>, wants: PollFlags, mark: u64) {
    let mut flags = EpollFlags::empty();
    flags.set(EpollFlags::EPOLLOUT, wants.contains(PollFlags::POLLOUT));
    flags.set(EpollFlags::EPOLLIN, wants.contains(PollFlags::POLLIN));
    let mut event = EpollEvent::new(flags, mark);
    if set.get().0.add(fd, event) == Err(Errno::EEXIST) {
        // If the kernel has no memory for the entry, the route is handled when its timer expires.
        let _ = set.get().0.modify(fd, &mut event);
    }
}

impl Core {
    // ---- agreement

    /// Requests a direct route to this peer for the program. Returns true if a message need not
    /// wait for the answer.
    pub(crate) fn want_route(&mut self, now: Micros, peer: Tid) -> bool {
        if !self.is_connected() || self.is_lifted() || peer == self.tid() || !peer.is_task() {
            return true;
        }
        if !self.direct.routes.is_settled(peer) {
            if self.is_gone(peer) {
                return true;
            }
            self.route_event(now, RouteEvent::Wanted(peer));
        }
        self.direct.routes.is_settled(peer)
    }

    /// Changes the program's requests for notifications about routes.
    pub(crate) fn watch_routes(
        &mut self,
        now: Micros,
        change: impl FnOnce(&mut Routes) -> PvmResult<()>,
    ) -> PvmResult<()> {
        let changed = change(&mut self.direct.routes);
        self.carry_out(now);
        changed
    }

    /// Handles a route message of a peer about direct routes.
    pub(super) fn take_direct_word(&mut self, now: Micros, from: Tid, near: bool, word: RouteWord) {
        let event = match word {
            RouteWord::DirectOffer {
                id,
                mut addresses,
                fingerprint,
                line,
            } => {
                self.agree_on_line(now, from, line);
                addresses.truncate(OFFER_ADDRESSES_MAX);
                self.direct.asking = Some(Asking {
                    addresses,
                    fingerprint,
                });
                RouteEvent::Asked {
                    peer: from,
                    id,
                    near,
                }
            }
            RouteWord::DirectAccept {
                id,
                fingerprint,
                line,
            } => {
                self.agree_on_line(now, from, line);
                self.direct.accepting = fingerprint;
                RouteEvent::Accepted {
                    peer: from,
                    id,
                    near: fingerprint == NOBODY,
                }
            }
            RouteWord::DirectRefuse { id } => RouteEvent::Refused { peer: from, id },
            _ => return,
        };
        if self.is_connected() && !self.is_lifted() {
            self.route_event(now, event);
        }
    }

    /// Adopts the incarnation that a peer announces in a route message. Frames on direct routes do
    /// not carry it, and they may be the first that the two tasks exchange since one of them was
    /// restarted.
    fn agree_on_line(&mut self, now: Micros, peer: Tid, line: u16) {
        if line != self.line_with(peer)
            && let Some(link) = self.link_to_send(peer)
        {
            link.follow(line);
            self.pump_link(now, peer);
        }
    }

    pub(super) fn route_event(&mut self, now: Micros, event: RouteEvent) {
        self.direct.routes.handle(now, event);
        if event != RouteEvent::Wake {
            self.raise_news();
        }
        self.carry_out(now);
    }

    /// Carries out the decisions of the agreement.
    fn carry_out(&mut self, now: Micros) {
        while let Some(output) = self.direct.routes.poll() {
            match output {
                RouteOutput::Offer { to, id } => {
                    if !self.offer_direct(now, to, id) {
                        self.direct.routes.handle(now, RouteEvent::Failed(to));
                    }
                }
                RouteOutput::Withdraw { id } => {
                    self.direct.offered.remove(&id);
                    self.direct.acceptor.withdraw(id);
                }
                RouteOutput::Accept { to, id } => {
                    let line = self.line_with(to);
                    self.say(
                        to,
                        RouteWord::DirectAccept {
                            id,
                            fingerprint: NOBODY,
                            line,
                        },
                        Vec::new(),
                    );
                }
                RouteOutput::Dial { to, id } => {
                    if !self.dial(now, to, id) {
                        self.say(to, RouteWord::DirectRefuse { id }, Vec::new());
                        self.direct.routes.handle(now, RouteEvent::Failed(to));
                    }
                }
                RouteOutput::Expect { id } => {
                    self.direct.acceptor.accepted(id, self.direct.accepting)
                }
                RouteOutput::Refuse { to, id } => {
                    self.say(to, RouteWord::DirectRefuse { id }, Vec::new());
                }
                RouteOutput::Close { peer } => self.close_direct(now, peer),
                RouteOutput::Note { ctx, tag, words } => {
                    let mut body = Packer::new(Encoding::Xdr);
                    body.items(words);
                    let me = self.tid();
                    self.deliver(Message {
                        src: me,
                        dst: me,
                        ctx,
                        tag,
                        wid: 0,
                        enc: ENC_XDR,
                        body: body.finish(),
                    });
                }
            }
            self.raise_news();
        }
        if let Some(due) = self.direct.routes.next_wakeup() {
            self.wake_at(due);
        }
        self.negotiate(now);
    }

    fn offer_direct(&mut self, now: Micros, to: Tid, id: OfferId) -> bool {
        if self.direct.ends.len() >= DIRECT_MAX {
            return false;
        }
        let Ok((port, fingerprint)) = self.direct.acceptor.offer(now, id) else {
            return false;
        };
        self.direct.offered.insert(id, to);
        let addresses = self
            .direct
            .addresses
            .iter()
            .map(|ip| SocketAddr::new(*ip, port));
        let addresses = addresses.take(OFFER_ADDRESSES_MAX).collect();
        let line = self.line_with(to);
        self.say(
            to,
            RouteWord::DirectOffer {
                id,
                addresses,
                fingerprint,
                line,
            },
            Vec::new(),
        )
    }

    fn dial(&mut self, now: Micros, to: Tid, id: OfferId) -> bool {
        let Some(Asking {
            addresses,
            fingerprint,
        }) = self.direct.asking.take()
        else {
            return false;
        };
        if self.direct.ends.len() >= DIRECT_MAX {
            return false;
        }
        let Ok(dialer) = Dialer::new(now, id, &addresses, fingerprint) else {
            return false;
        };
        let fingerprint = dialer.fingerprint();
        self.direct.dialers.insert(to, dialer);
        let line = self.line_with(to);
        self.say(
            to,
            RouteWord::DirectAccept {
                id,
                fingerprint,
                line,
            },
            Vec::new(),
        )
    }

    /// Advances all routes in setup.
    fn negotiate(&mut self, now: Micros) {
        if self.direct.acceptor.is_idle() && self.direct.dialers.is_empty() {
            if self.direct.ends.is_empty() {
                self.direct.ready = None;
            }
            return;
        }
        let mut done: Vec<(Tid, Result<DirectEnd, NoRoute>)> = Vec::new();
        for (id, outcome) in self.direct.acceptor.step(now) {
            if let Some(peer) = self.direct.offered.remove(&id) {
                done.push((peer, outcome));
            }
        }
        self.direct
            .dialers
            .retain(|peer, dialer| match dialer.step(now) {
                Some(outcome) => {
                    done.push((*peer, outcome));
                    false
                }
                None => true,
            });
        let dialers = self.direct.dialers.values().map(Dialer::next_wakeup);
        if let Some(due) = dialers.chain(self.direct.acceptor.next_wakeup()).min() {
            self.wake_at(due);
        }
        self.direct.watch_negotiations();
        for (peer, outcome) in done {
            match outcome {
                Ok(end) => self.install_direct(now, peer, end),
                Err(_) => self.route_event(now, RouteEvent::Failed(peer)),
            }
        }
    }

    fn install_direct(&mut self, now: Micros, peer: Tid, end: DirectEnd) {
        let Some(set) = self.direct.set() else {
            return self.route_event(now, RouteEvent::Failed(peer));
        };
        watch(&set, end.as_fd(), PollFlags::POLLIN, mark_of(peer));
        self.direct.ends.insert(
            peer,
            Far {
                end,
                blocked: false,
                unread: false,
                last_words: None,
                used: now,
            },
        );
        let look = *self.direct.rest_look.get_or_insert(now + REST_LOOK);
        self.wake_at(look);
        let route = self.next_route();
        if let Some(link) = self.link_to_send(peer) {
            link.handle(now, LinkEvent::RouteUp(route));
        }
        self.route_event(now, RouteEvent::Stands(peer));
        self.pump_direct(now, peer);
        self.drain_direct(now, peer);
    }

    /// Closes the connection to this peer, or its setup; the daemons carry the queued messages.
    fn close_direct(&mut self, now: Micros, peer: Tid) {
        self.direct.dialers.remove(&peer);
        if let Some(Far { end, blocked, .. }) = self.direct.ends.remove(&peer) {
            self.direct.blocked -= usize::from(blocked);
            if let Some(set) = &self.direct.ready {
                // Closing alone is not enough: a forked child may have a copy of the descriptor,
                // which would keep the entry in the set.
                let _ = set.get().0.delete(end.as_fd());
            }
            end.close();
            self.news_of_routes();
            self.back_to_daemon(now, peer);
        }
    }

    // ---- reading and writing

    /// Reads all direct routes that have data. Returns true if a frame arrived.
    pub(crate) fn look_far(&mut self, now: Micros) -> bool {
        let Some(set) = self.direct.ready.clone() else {
            return false;
        };
        let mut events = [EpollEvent::empty(); READY_MAX];
        let ready = set
            .get()
            .0
            .wait(&mut events, EpollTimeout::ZERO)
            .unwrap_or(0);
        let (mut found, mut negotiations) = (false, false);
        for event in &events[..ready] {
            if event.data() == NEGOTIATION {
                negotiations = true;
                continue;
            }
            let Ok(raw) = i32::try_from(event.data()) else {
                continue;
            };
            let peer = Tid::from_raw(raw);
            if event.events().contains(EpollFlags::EPOLLOUT) {
                self.pump_direct(now, peer);
            }
            found |= self.drain_direct(now, peer);
        }
        if negotiations {
            self.negotiate(now);
        }
        found
    }

    /// Reads one route. Returns true if a frame arrived.
    pub(super) fn drain_direct(&mut self, now: Micros, peer: Tid) -> bool {
        if self.inbox_is_full() {
            return false;
        }
        let (direct, links) = self.direct_and_links();
        let (Some(far), Some(link)) = (direct.ends.get_mut(&peer), links.get_mut(&peer)) else {
            return false;
        };
        let (mut found, mut garbage) = (false, false);
        let ended = far.end.read(&mut |frame| {
            found = true;
            match frame
                .split_first_chunk()
                .and_then(|(head, rest)| Some((decode_short_head(*head)?, rest)))
            {
                Some(((kind, seq, ack), rest)) => link.take(now, kind, seq, ack, rest),
                None => garbage = true,
            }
        });
        let answers = link.has_frame();
        far.unread = matches!(ended, Ok(true));
        if found {
            far.used = now;
            if let Some(last) = &mut far.last_words {
                last.silent_until = (now + LAST_WORDS_SILENCE).min(last.until);
            }
            self.deliver_from(peer);
            self.release_held(peer);
        }
        match ended {
            Err(_) => self.end_far(now, peer),
            Ok(_) if garbage => self.end_far(now, peer),
            Ok(true) => {}
            Ok(false) if answers => self.pump_direct(now, peer),
            Ok(false) => self.note_wakeup(peer),
        }
        found
    }

    /// Ends the route whose connection has been read to its end.
    fn end_far(&mut self, now: Micros, peer: Tid) {
        let gone = self
            .direct
            .ends
            .get(&peer)
            .and_then(|far| far.last_words)
            .is_some_and(|last| last.gone);
        self.route_event(now, RouteEvent::Ended(peer));
        self.release_held(peer);
        if gone {
            self.peer_gone(now, peer);
        }
    }

    /// Starts draining a connection on which nothing can be written: reads what the peer sent
    /// before, until the connection ends or has been silent for a while.
    fn hear_out(&mut self, now: Micros, peer: Tid, gone: bool) {
        let direct = &mut self.direct;
        let Some(far) = direct.ends.get_mut(&peer) else {
            return;
        };
        let silent_until = now + LAST_WORDS_SILENCE;
        let fresh = LastWords {
            silent_until,
            until: now + LAST_WORDS_WITHIN,
            gone,
        };
        far.last_words.get_or_insert(fresh).gone |= gone;
        if std::mem::take(&mut far.blocked) {
            direct.blocked -= 1;
            if let Some(set) = &direct.ready {
                watch(set, far.end.as_fd(), PollFlags::POLLIN, mark_of(peer));
            }
        }
        self.wake_at(silent_until);
        self.news_of_routes();
        while self.drain_direct(now, peer) {}
    }

    /// Writes frames of the link, as far as the socket accepts them.
    pub(super) fn pump_direct(&mut self, now: Micros, peer: Tid) {
        let (direct, links) = self.direct_and_links();
        let (Some(far), Some(link)) = (direct.ends.get_mut(&peer), links.get_mut(&peer)) else {
            return;
        };
        // If the peer has just ended, writing would make its kernel discard data that it has not
        // delivered. Its data must be read first; the window bounds the amount.
        if far.last_words.is_some() || far.unread {
            return;
        }
        let mut ended = false;
        loop {
            while far.end.has_room()
                && let Some(frame) = link.next_frame(now)
            {
                far.end
                    .push(&[&frame.encode_short_head(), frame.head, frame.body]);
                far.used = now;
            }
            ended |= far.end.flush().is_err();
            if ended || far.end.wants_write() || !link.has_frame() {
                break;
            }
        }
        let blocked = far.end.wants_write();
        if blocked != far.blocked && !ended {
            far.blocked = blocked;
            direct.blocked = if blocked {
                direct.blocked + 1
            } else {
                direct.blocked - 1
            };
            let wants = if blocked {
                PollFlags::POLLIN | PollFlags::POLLOUT
            } else {
                PollFlags::POLLIN
            };
            if let Some(set) = &direct.ready {
                watch(set, far.end.as_fd(), wants, mark_of(peer));
            }
            self.news_of_routes();
        }
        if ended {
            self.hear_out(now, peer, false);
        } else if !blocked {
            // If blocked, the socket's readiness triggers the next write.
            self.note_wakeup(peer);
        }
    }

    // ---- teardown

    /// Reads what has arrived and closes all direct routes: from here on everything goes through
    /// the daemon. Returns the peers of the closed routes.
    pub(super) fn end_direct(&mut self, now: Micros) -> Vec<Tid> {
        let peers: Vec<Tid> = self.direct.ends.keys().copied().collect();
        for peer in &peers {
            while self.drain_direct(now, *peer) {}
        }
        let unheard = self
            .direct
            .ends
            .iter()
            .filter(|(_, far)| far.last_words.is_some_and(|last| last.gone));
        let unheard: Vec<Tid> = unheard.map(|(peer, _)| *peer).collect();
        self.route_event(now, RouteEvent::LetGo);
        self.direct.acceptor.close();
        self.direct.offered.clear();
        self.direct.dialers.clear();
        self.direct.ready = None;
        self.direct.blocked = 0;
        unheard
            .into_iter()
            .for_each(|peer| self.peer_gone(now, peer));
        peers
    }

    /// Handles the end of a peer. Returns false if its connection must be drained first;
    /// [`Core::peer_gone`] is then called again after that.
    pub(super) fn far_gone(&mut self, now: Micros, peer: Tid) -> bool {
        if self.direct.leads_to(peer) {
            self.hear_out(now, peer, true);
            return false;
        }
        self.route_event(now, RouteEvent::Gone(peer));
        true
    }

    /// Closes the direct route to a peer that has migrated.
    pub(super) fn far_moved(&mut self, now: Micros, peer: Tid) {
        while self.drain_direct(now, peer) {}
        self.route_event(now, RouteEvent::Moved(peer));
    }

    /// Handles expired timers: unanswered offers, drained connections and idle routes.
    pub(super) fn wake_far(&mut self, now: Micros) {
        // Read before any timer causes a write: this task may have been stopped for a long time.
        self.look_far(now);
        let heard_out = self
            .direct
            .ends
            .iter()
            .filter(|(_, far)| far.last_words.is_some());
        for peer in heard_out.map(|(peer, _)| *peer).collect::<Vec<Tid>>() {
            // This task may have been stopped, so data may have arrived in time.
            while self.drain_direct(now, peer) {}
            match self.direct.ends.get(&peer).and_then(|far| far.last_words) {
                Some(last) if last.silent_until <= now => self.end_far(now, peer),
                Some(last) => self.wake_at(last.silent_until),
                None => {}
            }
        }
        self.let_rest(now);
        self.route_event(now, RouteEvent::Wake);
    }

    /// Frees the buffers of idle routes.
    fn let_rest(&mut self, now: Micros) {
        let direct = &mut self.direct;
        if direct.rest_look.is_some_and(|due| due <= now) {
            for far in direct
                .ends
                .values_mut()
                .filter(|far| now.since(far.used) >= REST_AFTER)
            {
                far.end.rest();
            }
            direct.rest_look = (!direct.ends.is_empty()).then(|| now + REST_LOOK);
        }
        if let Some(due) = self.direct.rest_look {
            self.wake_at(due);
        }
    }

    /// Returns the size of all buffers of direct routes.
    #[cfg(test)]
    pub(super) fn direct_buffer_bytes(&self) -> usize {
        self.direct
            .ends
            .values()
            .map(|far| far.end.buffer_bytes())
            .sum()
    }
}

fn mark_of(peer: Tid) -> u64 {
    u64::try_from(peer.raw()).expect("tids of tasks are positive")
}
