//! The rules of a session, one test each.

use crate::*;
use bytes::Bytes;

/// A session with members whose frames arrive at once.
struct Bench {
    session: Session,
    now: Millis,
    records: Vec<Record>,
    members: Vec<Option<(LinkId, Endpoint)>>,
    next_link: u64,
    closed_links: Vec<LinkId>,
    ended: Option<SessionEnd>,
}

impl Bench {
    fn new(change: impl FnOnce(&mut Settings)) -> Self {
        let mut settings = Settings::default();
        change(&mut settings);
        let mut bench = Self {
            session: Session::new("rules", settings, Millis(0)),
            now: Millis(0),
            records: Vec::new(),
            members: Vec::new(),
            next_link: 1,
            closed_links: Vec::new(),
            ended: None,
        };
        bench.settle();
        bench
    }

    fn add(&mut self, role: Role, place: Place) -> usize {
        let number = u8::try_from(self.members.len()).expect("few");
        let profile = Profile {
            role,
            host: format!("h{number}"),
            program: "test".into(),
            factor: 0,
        };
        let endpoint = Endpoint::new(Token([number; 16]), profile);
        self.members.push(None);
        let index = self.members.len() - 1;
        self.connect(index, endpoint, place, Role::Foreman);
        index
    }

    fn worker(&mut self) -> usize {
        self.add(Role::Worker, Place::Outside)
    }

    fn connect(&mut self, index: usize, mut endpoint: Endpoint, place: Place, rights: Role) {
        let link = LinkId(self.next_link);
        self.next_link += 1;
        endpoint.connected(self.now);
        self.members[index] = Some((link, endpoint));
        self.tell(Event::Opened {
            link,
            place,
            rights,
        });
    }

    fn tell(&mut self, event: Event) {
        self.session.handle(self.now, event);
        self.settle();
    }

    /// Exchanges frames until nothing is left.
    fn settle(&mut self) {
        loop {
            let mut has_changed = false;
            while let Some(output) = self.session.poll() {
                has_changed = true;
                match output {
                    Output::Record(record) => self.records.push(record),
                    Output::Send { link, frame } => {
                        for (own, endpoint) in self.members.iter_mut().flatten() {
                            if *own == link {
                                endpoint.handle(self.now, frame.clone());
                            }
                        }
                    }
                    Output::Close { link } => self.closed_links.push(link),
                    Output::Ended(end) => self.ended = Some(end),
                    Output::WatchTask { .. } | Output::Log(_) => {}
                }
            }
            for index in 0..self.members.len() {
                while let Some((link, frame)) = self.next_frame(index) {
                    has_changed = true;
                    self.session.handle(self.now, Event::Frame { link, frame });
                }
            }
            if !has_changed {
                break;
            }
        }
    }

    fn next_frame(&mut self, index: usize) -> Option<(LinkId, ToBroker)> {
        let now = self.now;
        let (link, endpoint) = self.members[index].as_mut()?;
        Some((*link, endpoint.poll(now)?))
    }

    fn endpoint(&mut self, index: usize) -> &mut Endpoint {
        &mut self.members[index].as_mut().expect("connected").1
    }

    fn id(&mut self, index: usize) -> MemberId {
        self.endpoint(index).identity().expect("welcomed").0
    }

    /// Breaks the connection and returns the member's side of it.
    fn disconnect(&mut self, index: usize) -> Endpoint {
        let (link, mut endpoint) = self.members[index].take().expect("connected");
        endpoint.disconnected();
        self.tell(Event::Closed { link });
        endpoint
    }

    fn request(&mut self, index: usize, request: Request) -> Option<Verdict> {
        let seq = self.endpoint(index).submit(request);
        self.settle();
        self.endpoint(index).take_verdict(seq)
    }

    fn send(&mut self, index: usize, to: Destination, text: &str, returns: bool) -> Verdict {
        let request = Request::Send {
            to,
            kind: 7,
            body: Bytes::copy_from_slice(text.as_bytes()),
            returns,
        };
        self.request(index, request).expect("a verdict")
    }

    fn take(&mut self, index: usize, pattern: Pattern) -> Option<Mail> {
        let mail = self.endpoint(index).take(pattern);
        self.settle();
        mail
    }

    fn advance(&mut self, millis: u64) {
        self.now.0 += millis;
        // Members that are connected send heartbeats.
        for index in 0..self.members.len() {
            if let Some((link, _)) = self.members[index] {
                let frame = ToBroker::Heartbeat;
                self.session.handle(self.now, Event::Frame { link, frame });
            }
        }
        self.tell(Event::Wakeup);
    }
}

fn message(from: MemberId, text: &str) -> Mail {
    Mail::Message {
        from,
        kind: 7,
        body: Bytes::copy_from_slice(text.as_bytes()),
    }
}

/// A number is never used again, and a message to a member that is gone does not reach another.
#[test]
fn numbers_are_never_used_twice() {
    let mut bench = Bench::new(|_| {});
    let (a, b) = (bench.worker(), bench.worker());
    let old = bench.id(b);
    bench.request(b, Request::Leave { moved_out: false });
    let c = bench.worker();
    assert_ne!(bench.id(c), old);
    let verdict = bench.send(a, old.into(), "x", false);
    assert_eq!(verdict, Verdict::Gone(GoneReason::Left));
    let unknown = Destination::Member(MemberId(99));
    assert_eq!(bench.send(a, unknown, "x", false), Verdict::Unknown);
    assert_eq!(bench.take(c, Pattern::any()), None);
}

/// Each way to go has its own reason.
#[test]
fn reasons_tell_how_a_member_went() {
    let mut bench = Bench::new(|_| {});
    let watcher = bench.worker();
    bench.request(watcher, Request::Watch(WatchTarget::All));
    let (left, moved, lost, silent) = (
        bench.worker(),
        bench.worker(),
        bench.worker(),
        bench.worker(),
    );
    let killed = bench.add(Role::Worker, Place::Inside { tid: 5 });
    let ids = [left, moved, killed, lost, silent].map(|index| bench.id(index));
    bench.request(left, Request::Leave { moved_out: false });
    bench.request(moved, Request::Leave { moved_out: true });
    bench.tell(Event::TaskEnded {
        tid: 5,
        reason: GoneReason::Killed,
    });
    bench.disconnect(lost);
    bench.advance(Timing::default().grace.0);
    bench.members[silent] = None;
    for _ in 0..8 {
        bench.advance(10_000);
    }
    let reasons = [
        GoneReason::Left,
        GoneReason::MovedOut,
        GoneReason::Killed,
        GoneReason::Lost,
        GoneReason::TimedOut,
    ];
    for (member, reason) in ids.into_iter().zip(reasons) {
        let notice = Mail::Gone {
            member,
            reason,
            undelivered: 0,
        };
        assert_eq!(bench.take(watcher, Pattern::any()), Some(notice));
    }
}

/// A member that is away keeps its mail and goes on where it was; after the grace time it is gone.
#[test]
fn away_is_not_gone() {
    let mut bench = Bench::new(|_| {});
    let (a, b) = (bench.worker(), bench.worker());
    let (a_id, b_id) = (bench.id(a), bench.id(b));
    let endpoint = bench.disconnect(b);
    bench.advance(20_000);
    assert_eq!(bench.send(a, b_id.into(), "kept", false), Verdict::Taken);
    let state = |bench: &Bench| bench.session.report(bench.now).members[1].state;
    assert_eq!(state(&bench), MemberState::Away);
    bench.connect(b, endpoint, Place::Outside, Role::Worker);
    assert_eq!(state(&bench), MemberState::Present);
    assert_eq!(bench.endpoint(b).identity(), Some((b_id, Incarnation(2))));
    assert_eq!(bench.take(b, Pattern::any()), Some(message(a_id, "kept")));
    let endpoint = bench.disconnect(b);
    bench.advance(30_000);
    let verdict = bench.send(a, b_id.into(), "x", false);
    assert_eq!(verdict, Verdict::Gone(GoneReason::Lost));
    bench.connect(b, endpoint, Place::Outside, Role::Worker);
    let gone = Phase::Closed(Closing::Gone(GoneReason::Lost));
    assert_eq!(bench.endpoint(b).phase(), gone);
}

/// What was not received comes back if the sender asked for that, else it is counted as dropped.
/// The notice comes after the last message and tells the number.
#[test]
fn undelivered_messages_come_back_before_the_notice() {
    let mut bench = Bench::new(|_| {});
    let (a, b) = (bench.worker(), bench.worker());
    let (a_id, b_id) = (bench.id(a), bench.id(b));
    bench.request(a, Request::Watch(WatchTarget::Member(b_id)));
    bench.send(a, b_id.into(), "received", true);
    bench.take(b, Pattern::any());
    bench.send(a, b_id.into(), "returned", true);
    bench.send(a, b_id.into(), "dropped", false);
    bench.send(b, a_id.into(), "last", false);
    bench.request(b, Request::Leave { moved_out: false });
    let reason = GoneReason::Left;
    assert_eq!(bench.take(a, Pattern::any()), Some(message(b_id, "last")));
    let returned = Mail::Returned {
        to: b_id,
        kind: 7,
        body: Bytes::from_static(b"returned"),
        reason,
    };
    assert_eq!(bench.take(a, Pattern::any()), Some(returned));
    let notice = Mail::Gone {
        member: b_id,
        reason,
        undelivered: 2,
    };
    assert_eq!(bench.take(a, Pattern::any()), Some(notice));
    let counts = bench.session.counts();
    assert_eq!((counts.returned, counts.dropped), (1, 1));
}

/// A limit refuses with its name; room is offered when half of the mailbox is free.
#[test]
fn limits_have_names_and_room_is_offered() {
    let mut bench = Bench::new(|settings| {
        settings.limits.member_messages_max = 4;
        settings.limits.member_bytes_max = 100;
        settings.limits.message_bytes_max = 50;
        settings.limits.session_messages_max = 6;
        settings.limits.session_bytes_max = 150;
    });
    let (a, b, c) = (bench.worker(), bench.worker(), bench.worker());
    let (b_to, c_to) = (bench.id(b).into(), bench.id(c).into());
    let full = Verdict::Full;
    let large = "x".repeat(51);
    assert_eq!(
        bench.send(a, b_to, &large, false),
        full(LimitName::MessageBytes)
    );
    let half = "x".repeat(45);
    assert_eq!(bench.send(a, b_to, &half, false), Verdict::Taken);
    assert_eq!(bench.send(a, b_to, &half, false), Verdict::Taken);
    assert_eq!(
        bench.send(a, b_to, &half, false),
        full(LimitName::MemberBytes)
    );
    assert_eq!(bench.send(a, c_to, &half, false), Verdict::Taken);
    assert_eq!(
        bench.send(a, c_to, &half, false),
        full(LimitName::SessionBytes)
    );
    for _ in 0..2 {
        assert_eq!(bench.send(a, b_to, "", false), Verdict::Taken);
    }
    assert_eq!(
        bench.send(a, b_to, "", false),
        full(LimitName::MemberMessages)
    );
    assert_eq!(bench.send(a, c_to, "", false), Verdict::Taken);
    assert_eq!(
        bench.send(a, c_to, "", false),
        full(LimitName::SessionMessages)
    );
    let offers = bench.endpoint(a).room_offers();
    bench.take(b, Pattern::any());
    assert_eq!(bench.endpoint(a).room_offers(), offers);
    bench.take(b, Pattern::any());
    assert_ne!(bench.endpoint(a).room_offers(), offers);
    assert_eq!(bench.send(a, b_to, "", false), Verdict::Taken);
}

/// Members and joins per second are limited; the member may try again.
#[test]
fn joins_are_limited() {
    let mut bench = Bench::new(|settings| {
        settings.limits.members_max = 3;
        settings.limits.joins_per_second_max = 2;
    });
    bench.worker();
    bench.worker();
    let third = bench.worker();
    let refusal = bench.endpoint(third).take_temporary_refusal();
    assert_eq!(refusal, Some(Refusal::Limit(LimitName::JoinsPerSecond)));
    assert_eq!(bench.endpoint(third).phase(), Phase::Disconnected);
    bench.advance(1000);
    let endpoint = bench.members[third].take().expect("it is there").1;
    bench.connect(third, endpoint, Place::Outside, Role::Worker);
    assert_eq!(bench.endpoint(third).phase(), Phase::Present);
    let fourth = bench.worker();
    let refusal = bench.endpoint(fourth).take_temporary_refusal();
    assert_eq!(refusal, Some(Refusal::Limit(LimitName::Members)));
}

/// Mail that does not match stays and does not keep a match from coming, however much there is.
#[test]
fn mail_that_does_not_match_stays() {
    let mut bench = Bench::new(|_| {});
    let (a, b) = (bench.worker(), bench.worker());
    let (a_id, b_to) = (bench.id(a), bench.id(b).into());
    for number in 0..500 {
        bench.send(a, b_to, &number.to_string(), false);
    }
    let request = Request::Send {
        to: b_to,
        kind: 8,
        body: Bytes::new(),
        returns: false,
    };
    bench.request(a, request);
    let wanted = Pattern::any().kind(8).source(a_id);
    // The broker has sent only what the member's credit allows.
    assert_eq!(bench.endpoint(b).probe(wanted), None);
    let mut polls = 0;
    let head = loop {
        bench.settle();
        polls += 1;
        match bench.endpoint(b).probe(wanted) {
            Some(head) => break head,
            None => assert!(polls < 20, "no match after {polls} polls"),
        }
    };
    assert_eq!((head.source, head.kind), (a_id, MailKind::Message(8)));
    assert_eq!(
        bench.endpoint(b).probe(wanted),
        Some(head),
        "a probe removes nothing"
    );
    assert!(bench.endpoint(b).take_at(head.seq).is_some());
    bench.settle();
    for number in 0..500 {
        let expected = message(a_id, &number.to_string());
        assert_eq!(bench.take(b, Pattern::any()), Some(expected));
    }
}

/// The foreman's word ends the session: members are told and get time; late comers hear "over".
#[test]
fn a_foreman_ends_the_session() {
    let mut bench = Bench::new(|_| {});
    let foreman = bench.add(Role::Foreman, Place::Outside);
    let worker = bench.worker();
    let within = Millis(5_000);
    let verdict = bench.request(worker, Request::Finish { within });
    assert_eq!(verdict, Some(Verdict::NotAllowed));
    bench.request(foreman, Request::Finish { within });
    let end = SessionEnd::Finished;
    assert_eq!(bench.endpoint(worker).over(), Some(end));
    let foreman_id = bench.id(foreman);
    let verdict = bench.send(worker, foreman_id.into(), "last result", false);
    assert_eq!(verdict, Verdict::Taken, "members may finish");
    let late = bench.worker();
    let over = Phase::Closed(Closing::Over(end));
    assert_eq!(bench.endpoint(late).phase(), over);
    assert_eq!(bench.ended, None);
    bench.advance(5_000);
    assert_eq!(bench.ended, Some(end));
    assert_eq!(bench.endpoint(worker).phase(), over);
    assert_eq!(bench.session.next_wakeup(), None);
    let later = bench.worker();
    assert_eq!(bench.endpoint(later).phase(), over);
}

/// A session without members ends after the idle time, and not before.
#[test]
fn idle_sessions_end() {
    let mut bench = Bench::new(|_| {});
    bench.advance(59_000);
    let worker = bench.worker();
    bench.advance(100_000);
    assert_eq!(bench.ended, None);
    bench.request(worker, Request::Leave { moved_out: false });
    bench.advance(59_000);
    assert_eq!(bench.ended, None);
    bench.advance(1_000);
    assert_eq!(bench.ended, Some(SessionEnd::Idle));
}

/// After the death of the foreman, workers wait for the next one or the session ends.
#[test]
fn foreman_policy_decides() {
    for policy in [ForemanPolicy::Wait, ForemanPolicy::End] {
        let mut bench = Bench::new(|settings| settings.foreman_policy = policy);
        let worker = bench.worker();
        let verdict = bench.send(worker, Destination::Foreman, "early", false);
        assert_eq!(verdict, Verdict::NoForeman);
        let offers = bench.endpoint(worker).room_offers();
        let foreman = bench.add(Role::Foreman, Place::Inside { tid: 9 });
        assert_ne!(bench.endpoint(worker).room_offers(), offers);
        bench.tell(Event::TaskEnded {
            tid: 9,
            reason: GoneReason::Killed,
        });
        bench.members[foreman] = None;
        match policy {
            ForemanPolicy::Wait => {
                bench.advance(1_000_000);
                let next = bench.add(Role::Foreman, Place::Outside);
                let verdict = bench.send(worker, Destination::Foreman, "hello", false);
                assert_eq!(verdict, Verdict::Taken);
                assert!(bench.take(next, Pattern::any()).is_some());
            }
            ForemanPolicy::End => {
                let over = bench.endpoint(worker).over();
                assert_eq!(over, Some(SessionEnd::ForemanGone));
                bench.advance(Timing::default().finish.0);
                assert_eq!(bench.ended, over);
            }
        }
    }
}

/// A foreman that the broker has started and that ends before it joins ends the session, if that is
/// the policy. The time that a foreman has given for the end counts, also after the foreman has
/// left.
#[test]
fn a_foreman_may_die_early_and_leave_early() {
    for (policy, ends) in [(ForemanPolicy::Wait, false), (ForemanPolicy::End, true)] {
        let mut bench = Bench::new(|settings| settings.foreman_policy = policy);
        let worker = bench.worker();
        bench.tell(Event::ForemanEnded);
        let over = bench.endpoint(worker).over();
        assert_eq!(over, ends.then_some(SessionEnd::ForemanGone));
    }
    let mut bench = Bench::new(|settings| settings.foreman_policy = ForemanPolicy::End);
    let foreman = bench.add(Role::Foreman, Place::Outside);
    let worker = bench.worker();
    let within = Millis(60_000);
    bench.request(foreman, Request::Finish { within });
    bench.request(foreman, Request::Leave { moved_out: false });
    bench.tell(Event::ForemanEnded);
    bench.advance(59_000);
    assert_eq!(bench.endpoint(worker).phase(), Phase::Present);
    bench.advance(1_000);
    assert_eq!(bench.ended, Some(SessionEnd::Finished));
}

/// The answers of limits name the limit, in words for the user, too.
#[test]
fn answers_of_limits_contain_the_name() {
    for limit in [
        LimitName::Members,
        LimitName::JoinsPerSecond,
        LimitName::MemberMessages,
        LimitName::MemberBytes,
        LimitName::SessionMessages,
        LimitName::SessionBytes,
        LimitName::MessageBytes,
    ] {
        let answers = [
            Refusal::Limit(limit).to_string(),
            Verdict::Full(limit).to_string(),
        ];
        for answer in answers {
            assert!(
                answer.contains(&format!("limit {}", limit.name())),
                "{answer}"
            );
        }
    }
}

/// Only the newest connection of a member counts; a state that is older than what the member has
/// received is refused; a worker's secret makes no foreman.
#[test]
fn stale_and_unauthorized_members_are_refused() {
    let mut bench = Bench::new(|_| {});
    let (a, b) = (bench.worker(), bench.worker());
    let b_to = bench.id(b).into();
    let profile = Profile {
        role: Role::Worker,
        host: "h1".into(),
        program: "test".into(),
        factor: 0,
    };
    bench.send(a, b_to, "1", false);
    bench.take(b, Pattern::any());
    // The same token without what was received.
    let older = Endpoint::new(Token([1; 16]), profile);
    bench.members.push(None);
    bench.connect(2, older, Place::Outside, Role::Worker);
    let refused = |refusal| Phase::Closed(Closing::Refused(refusal));
    assert_eq!(bench.endpoint(2).phase(), refused(Refusal::OlderState));
    // The broker learns of the new connection before the old one ends.
    let (old_link, endpoint) = bench.members[b].take().expect("connected");
    bench.connect(b, endpoint, Place::Outside, Role::Worker);
    assert!(bench.closed_links.contains(&old_link));
    bench.tell(Event::Closed { link: old_link });
    assert_eq!(bench.send(a, b_to, "2", false), Verdict::Taken);
    assert!(bench.take(b, Pattern::any()).is_some());
    let profile = Profile {
        role: Role::Foreman,
        host: "h1".into(),
        program: "test".into(),
        factor: 0,
    };
    bench.members.push(None);
    let foreman = Endpoint::new(Token([9; 16]), profile);
    bench.connect(3, foreman, Place::Outside, Role::Worker);
    assert_eq!(bench.endpoint(3).phase(), refused(Refusal::NotAllowed));
}

/// A connection from outside without traffic carries heartbeats in both directions, and both sides
/// notice a half-open connection.
#[test]
fn both_sides_notice_a_dead_connection() {
    let mut bench = Bench::new(|_| {});
    let a = bench.worker();
    let timing = Timing::default();
    let (link, endpoint) = bench.members[a].take().expect("connected");
    let mut endpoint = endpoint;
    let half = Millis(timing.heartbeat.0);
    assert!(endpoint.keep_alive(half));
    assert_eq!(endpoint.poll(half), Some(ToBroker::Heartbeat));
    assert!(!endpoint.keep_alive(timing.silence_max));
    bench.now = half;
    bench.session.handle(half, Event::Wakeup);
    let outputs: Vec<Output> = std::iter::from_fn(|| bench.session.poll()).collect();
    let frame = ToMember::Heartbeat;
    assert!(outputs.contains(&Output::Send { link, frame }));
    bench.now = timing.silence_max;
    bench.tell(Event::Wakeup);
    assert!(bench.closed_links.contains(&link));
    assert_eq!(
        bench.session.report(bench.now).members[0].state,
        MemberState::Away
    );
}

/// The report has state, traffic and the age of the oldest waiting message of each member, also as
/// JSON names.
#[test]
fn the_report_tells_what_waits() {
    let mut bench = Bench::new(|_| {});
    let (a, b) = (bench.worker(), bench.worker());
    let b_to = bench.id(b).into();
    bench.send(a, b_to, "12345", false);
    bench.advance(700);
    let report = bench.session.report(bench.now);
    let (sender, receiver) = (&report.members[0], &report.members[1]);
    assert_eq!((sender.sent, sender.waiting), (1, 0));
    assert_eq!((receiver.waiting, receiver.waiting_bytes), (1, 5));
    assert_eq!(receiver.oldest, Millis(700));
    bench.take(b, Pattern::any());
    let report = bench.session.report(bench.now);
    assert_eq!((report.members[1].received, report.waiting), (1, 0));
}

/// The journal's records restore the session; a snapshot is equal to them.
#[test]
fn records_restore_the_session() {
    let mut bench = Bench::new(|_| {});
    let (a, b) = (bench.worker(), bench.worker());
    let (a_id, b_to) = (bench.id(a), bench.id(b).into());
    bench.send(a, b_to, "before", true);
    let restored = State::recover(bench.records.clone());
    assert_eq!(&restored, bench.session.state());
    bench.session = Session::resume(restored, bench.now);
    for index in [a, b] {
        let mut endpoint = bench.members[index].take().expect("it is there").1;
        endpoint.disconnected();
        bench.connect(index, endpoint, Place::Outside, Role::Worker);
    }
    assert_eq!(bench.send(a, b_to, "after", true), Verdict::Taken);
    assert_eq!(bench.take(b, Pattern::any()), Some(message(a_id, "before")));
    assert_eq!(bench.take(b, Pattern::any()), Some(message(a_id, "after")));
}
