//! Direct routes to tasks on other hosts: how they come about, how they are read and written, how they end.
//!
//! As a ring, such a route is one way for a link's frames and nothing more: it may end at any time, and the daemons carry on.
//! All descriptors are in one set of the kernel's, which the helper watches while nobody waits awake.

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

/// Direct routes of one task at a time.
pub(crate) const DIRECT_MAX: usize = 512;
/// Ready descriptors looked at in one go.
const READY_MAX: usize = 64;
/// Marks those of routes that do not stand yet.
const NEGOTIATION: u64 = u64::MAX;
/// So long after a thread has looked itself, the helper does not.
pub(crate) const ATTENDED: Micros = Micros::from_millis(2);
/// A connection of which only the end is awaited is given up after so long a silence.
pub(crate) const LAST_WORDS_SILENCE: Micros = Micros::from_secs(2);
/// It is given up after so long in any case.
pub(crate) const LAST_WORDS_WITHIN: Micros = Micros::from_secs(30);
/// A route over which nothing went for so long gives its buffers back.
const REST_AFTER: Micros = Micros::from_secs(60);
/// How often that is looked at.
const REST_LOOK: Micros = Micros::from_secs(10);
/// No certificate: tasks on one host need none.
const NOBODY: Fingerprint = [0; 32];

/// An end, and how it stands with it.
#[derive(Debug)]
struct Far {
    end: DirectEnd,
    /// Its output waits for the socket.
    blocked: bool,
    /// The last look has left something in the socket.
    unread: bool,
    /// Nothing more is written; what the peer had sent is still read.
    last_words: Option<LastWords>,
    /// When something went last.
    used: Micros,
}

/// How long a connection is read whose peer can be told nothing more.
#[derive(Clone, Copy, Debug)]
struct LastWords {
    /// As long as nothing comes: until then.
    silent_until: Micros,
    until: Micros,
    /// The peer has ended; everybody else is told when it has been heard out.
    gone: bool,
}

/// What a task that asks has said of where it listens.
#[derive(Debug)]
struct Asking {
    addresses: Vec<SocketAddr>,
    fingerprint: Fingerprint,
}

/// The kernel's set of descriptors that can be read or written.
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
    /// Whom our offers are for.
    offered: FxHashMap<OfferId, Tid>,
    dialers: FxHashMap<Tid, Dialer>,
    /// What the offer says that is being answered.
    asking: Option<Asking>,
    /// What the acceptance says that is being taken.
    accepting: Fingerprint,
    ends: FxHashMap<Tid, Far>,
    blocked: usize,
    /// When it is looked at the next time which ones may rest.
    rest_look: Option<Micros>,
    ready: Option<Arc<Own<ReadySet>>>,
    /// When a thread that waits awake looked last.
    attended: Option<Micros>,
}

impl Direct {
    /// None yet.
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

    /// The task is on another host now.
    pub(crate) fn set_addresses(&mut self, addresses: Vec<IpAddr>) {
        self.addresses = addresses;
    }

    /// True when a direct route leads to this task.
    pub(crate) fn leads_to(&self, peer: Tid) -> bool {
        self.ends.contains_key(&peer)
    }

    /// True when nothing can come by a direct route.
    pub(crate) fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// True when what was sent to this task waits for its socket.
    pub(crate) fn is_blocked(&self, peer: Tid) -> bool {
        self.ends.get(&peer).is_some_and(|far| far.blocked)
    }

    /// What the helper has to watch, unless a thread is at it.
    pub(crate) fn to_watch(&self, now: Micros) -> Option<Arc<Own<ReadySet>>> {
        let attended = self.attended.is_some_and(|at| now.since(at) < ATTENDED);
        self.ready.clone().filter(|_| !attended || self.has_work())
    }

    /// True when the helper must not leave the watching to others.
    pub(crate) fn must_be_watched(&self) -> bool {
        self.is_open() && (self.attended.is_none() || self.has_work())
    }

    /// There is something to be done that no waiting thread looks for.
    fn has_work(&self) -> bool {
        self.blocked > 0 || !self.dialers.is_empty() || !self.acceptor.is_idle()
    }

    /// True when there is something to watch at all.
    pub(crate) fn is_open(&self) -> bool {
        self.ready.is_some()
    }

    /// A thread looks itself now, or (`None`) none does any more.
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

    /// Has the set watch everything of routes that do not stand yet.
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

/// Has the set watch a descriptor, in another way if it does already.
fn watch(set: &Own<ReadySet>, fd: BorrowedFd<'_>, wants: PollFlags, mark: u64) {
    let mut flags = EpollFlags::empty();
    flags.set(EpollFlags::EPOLLOUT, wants.contains(PollFlags::POLLOUT));
    flags.set(EpollFlags::EPOLLIN, wants.contains(PollFlags::POLLIN));
    let mut event = EpollEvent::new(flags, mark);
    if set.get().0.add(fd, event) == Err(Errno::EEXIST) {
        // Without memory for it in the kernel the route is looked at when its time is up.
        let _ = set.get().0.modify(fd, &mut event);
    }
}

impl Core {
    // ---- the agreement

    /// The program wants a direct route to this task; true when a message need not wait for it.
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

    /// Changes what the program wants to know of routes.
    pub(crate) fn watch_routes(
        &mut self,
        now: Micros,
        change: impl FnOnce(&mut Routes) -> PvmResult<()>,
    ) -> PvmResult<()> {
        let changed = change(&mut self.direct.routes);
        self.carry_out(now);
        changed
    }

    /// A word of another task about a direct route.
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

    /// What goes directly says nothing of timelines, and it may be the first that these two say to each other since one of
    /// them began again.
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

    /// Does what the agreement wants.
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

    /// Goes on with routes that do not stand yet.
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

    /// Lets go of what leads to this task; the daemons carry what waits.
    fn close_direct(&mut self, now: Micros, peer: Tid) {
        self.direct.dialers.remove(&peer);
        if let Some(Far { end, blocked, .. }) = self.direct.ends.remove(&peer) {
            self.direct.blocked -= usize::from(blocked);
            if let Some(set) = &self.direct.ready {
                // A forked child may have a copy of the descriptor, with which it would stay in the set.
                let _ = set.get().0.delete(end.as_fd());
            }
            end.close();
            self.news_of_routes();
            self.back_to_daemon(now, peer);
        }
    }

    // ---- reading and writing

    /// Takes in what has come by direct routes; true when there was anything.
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

    /// Takes in what has come by one route; true when there was anything.
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

    /// A connection has been read to its end.
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

    /// Nothing more can be said to a peer: reads what it had said before, until the connection ends or has been silent for
    /// a while.
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

    /// Sends what the link has, as far as the socket takes it.
    pub(super) fn pump_direct(&mut self, now: Micros, peer: Tid) {
        let (direct, links) = self.direct_and_links();
        let (Some(far), Some(link)) = (direct.ends.get_mut(&peer), links.get_mut(&peer)) else {
            return;
        };
        // If the peer has just ended, its kernel would answer by dropping what it has not delivered yet: what it has said is
        // read first. Its window bounds how much that can be.
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
            // Otherwise the socket says when it is time.
            self.note_wakeup(peer);
        }
    }

    // ---- end

    /// Reads what is there and lets go of all direct routes: from here on everything goes through the daemon. Says to
    /// whom they led.
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

    /// A task has ended. False when it has to be heard out first, or has been: then this is no concern of the caller's.
    pub(super) fn far_gone(&mut self, now: Micros, peer: Tid) -> bool {
        if self.direct.leads_to(peer) {
            self.hear_out(now, peer, true);
            return false;
        }
        self.route_event(now, RouteEvent::Gone(peer));
        true
    }

    /// A task runs elsewhere.
    pub(super) fn far_moved(&mut self, now: Micros, peer: Tid) {
        while self.drain_direct(now, peer) {}
        self.route_event(now, RouteEvent::Moved(peer));
    }

    /// Answers that did not come, and connections that have been silent for long enough.
    pub(super) fn wake_far(&mut self, now: Micros) {
        // Before anything is written because its time has come: this task may have stood still for long.
        self.look_far(now);
        let heard_out = self
            .direct
            .ends
            .iter()
            .filter(|(_, far)| far.last_words.is_some());
        for peer in heard_out.map(|(peer, _)| *peer).collect::<Vec<Tid>>() {
            // This task may have stood still itself.
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

    /// Routes that nobody uses give their buffers back.
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

    /// Bytes of memory for what comes and goes by direct routes.
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
