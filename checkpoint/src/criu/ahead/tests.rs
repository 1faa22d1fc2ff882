//! Tests of the proxy between models of `criu lazy-pages` and the source.

use super::*;
use crate::engine::pages::BLOCK_PAGES;
use proptest::prelude::*;
use std::collections::BTreeSet;

const PAGE: u64 = 16;

/// Returns the content of a page: its process and address, so all pages differ.
fn content(process: u64, address: u64) -> [u8; PAGE as usize] {
    [process.to_ne_bytes(), address.to_ne_bytes()]
        .concat()
        .try_into()
        .expect("two numbers")
}

/// The pre-copied state of a page: none, its current content, or older content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Before {
    Nothing,
    Same,
    Older,
}

/// Distributes these states over the pages.
fn before(process: u64, address: u64) -> Before {
    [
        Before::Same,
        Before::Same,
        Before::Older,
        Before::Same,
        Before::Nothing,
    ][((address / PAGE * 7 + process) % 5) as usize]
}

/// Returns the pre-copied pages of this memory.
fn store(missing: &BTreeMap<u64, BTreeMap<u64, u64>>) -> ReceivedPages {
    let mut store = ReceivedPages::with_page_size(PAGE);
    let stretches = missing
        .iter()
        .flat_map(|(process, stretches)| stretches.iter().map(|stretch| (*process, stretch)));
    for (process, address) in stretches.flat_map(|(process, (from, to))| {
        (*from..*to)
            .step_by(PAGE as usize)
            .map(move |at| (process, at))
    }) {
        let was = content(
            process,
            if before(process, address) == Before::Same {
                address
            } else {
                !address
            },
        );
        if before(process, address) != Before::Nothing {
            store
                .insert(process, address, &was)
                .expect("there is memory");
        }
    }
    store
}

/// A model of the source. It panics if a page is requested that is not missing, and never answers
/// beyond the end of a range.
struct Source {
    missing: BTreeMap<u64, BTreeMap<u64, u64>>,
    form: Form,
    /// Maximum number of pages in a reply.
    pages_max: u64,
    asked: Vec<Head>,
    says: VecDeque<u8>,
}

impl Source {
    fn hear(&mut self, questions: &[u8]) {
        let form = self.form;
        for head in questions.chunks(form.bytes()).map(|bytes| form.read(bytes)) {
            if head.command == CLOSE {
                self.says.extend(PARTING);
                continue;
            }
            assert!(matches!(head.command, GET | GET_CHANGED));
            let stretch = self.missing[&head.process]
                .range(..=head.address)
                .next_back();
            let (_, &end) = stretch.expect("it is missing");
            assert!(head.address < end, "it is missing");
            if head.command == GET_CHANGED {
                assert!(head.pages <= (end - head.address) / PAGE);
                self.says_what_has_changed(&head);
                self.asked.push(head);
                continue;
            }
            let pages = head
                .pages
                .min((end - head.address) / PAGE)
                .min(self.pages_max);
            self.asked.push(head);
            self.says.extend(self.form.write(&Head {
                command: PRESENT << FLAGS_SHIFT | ADD,
                pages,
                ..head
            }));
            for page in 0..pages {
                self.says
                    .extend(content(head.process, head.address + page * PAGE));
            }
        }
    }

    fn says_what_has_changed(&mut self, head: &Head) {
        self.says.extend(self.form.write(&Head {
            command: CHANGED,
            ..*head
        }));
        let addresses = (0..head.pages).map(|page| head.address + page * PAGE);
        let comes: Vec<(u64, bool)> = addresses
            .map(|address| (address, before(head.process, address) != Before::Same))
            .collect();
        for eight in comes.chunks(8) {
            self.says.push_back(
                eight
                    .iter()
                    .rev()
                    .fold(0, |byte, (_, comes)| byte << 1 | u8::from(*comes)),
            );
        }
        for (address, _) in comes.iter().filter(|(_, comes)| *comes) {
            self.says.extend(content(head.process, *address));
        }
    }
}

/// A model of CRIU: a background transfer from low to high addresses, with one open request for
/// each process, and requests for single pages meanwhile.
struct Engine {
    form: Form,
    /// Pages of each process that were not requested yet.
    left: BTreeMap<u64, BTreeSet<u64>>,
    /// Unanswered requests in their order.
    open: VecDeque<Head>,
    heard: Vec<u8>,
    pages_at_once: u64,
    got: BTreeSet<(u64, u64)>,
}

impl Engine {
    fn new(missing: &BTreeMap<u64, BTreeMap<u64, u64>>, form: Form) -> Engine {
        let pages = |stretches: &BTreeMap<u64, u64>| {
            stretches
                .iter()
                .flat_map(|(start, end)| (*start..*end).step_by(PAGE as usize))
                .collect()
        };
        let left = missing
            .iter()
            .map(|(process, stretches)| (*process, pages(stretches)))
            .collect();
        Engine {
            form,
            left,
            open: VecDeque::new(),
            heard: Vec::new(),
            pages_at_once: 4,
            got: BTreeSet::new(),
        }
    }

    fn ask(&mut self, process: u64, address: u64, pages: u64) -> Vec<u8> {
        let head = Head {
            command: GET,
            pages,
            address,
            process,
        };
        let left = self.left.get_mut(&process).expect("it misses something");
        for page in 0..pages {
            left.remove(&(address + page * PAGE));
        }
        self.open.push_back(head);
        self.form.write(&head)
    }

    /// Returns the next request of the background transfer.
    fn in_turn(&mut self, process: u64) -> Option<Vec<u8>> {
        let is_open = self
            .open
            .iter()
            .any(|head| head.process == process && head.pages > 1);
        let left = &self.left[&process];
        let first = *left.first().filter(|_| !is_open)?;
        let follow =
            (0..self.pages_at_once).take_while(|page| left.contains(&(first + page * PAGE)));
        let pages = follow.count() as u64;
        self.pages_at_once = (self.pages_at_once + 4).min(200);
        Some(self.ask(process, first, pages))
    }

    /// Returns the request for a page fault.
    fn need(&mut self, process: u64, which: usize) -> Option<Vec<u8>> {
        let left = &self.left[&process];
        let address = *left.iter().nth(which % left.len().max(1))?;
        self.pages_at_once = 4;
        Some(self.ask(process, address, 1))
    }

    fn hear(&mut self, bytes: &[u8]) {
        self.heard.extend(bytes);
        while self.heard.len() >= self.form.bytes() && !self.open.is_empty() {
            let head = self.form.read(&self.heard);
            let length = self.form.bytes() + (head.pages * PAGE) as usize;
            if self.heard.len() < length {
                return;
            }
            let open = self.open.pop_front().expect("it has asked");
            assert_eq!(head.command, PRESENT << FLAGS_SHIFT | ADD);
            assert_eq!((head.process, head.address), (open.process, open.address));
            assert!(
                (1..=open.pages).contains(&head.pages),
                "{head:?} for {open:?}"
            );
            let body: Vec<u8> = self.heard.drain(..length).skip(self.form.bytes()).collect();
            for (page, bytes) in body.chunks(PAGE as usize).enumerate() {
                let address = head.address + page as u64 * PAGE;
                assert_eq!(bytes, content(head.process, address));
                assert!(self.got.insert((head.process, address)), "twice");
            }
            for page in head.pages..open.pages {
                self.left
                    .get_mut(&head.process)
                    .expect("known")
                    .insert(open.address + page * PAGE);
            }
        }
    }
}

/// A model of CRIU's socket.
struct Socket {
    bytes: Vec<u8>,
    room: usize,
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(self.room);
        self.room -= taken;
        self.bytes.extend(&bytes[..taken]);
        if taken == 0 {
            Err(io::ErrorKind::WouldBlock.into())
        } else {
            Ok(taken)
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Pair {
    ahead: Ahead,
    engine: Engine,
    source: Source,
    /// Maximum number of bytes that CRIU accepts at once.
    room: usize,
}

impl Pair {
    fn new(missing: &BTreeMap<u64, BTreeMap<u64, u64>>, form: Form, pages_max: u64) -> Pair {
        Pair::with(
            missing,
            ReceivedPages::with_page_size(PAGE),
            form,
            pages_max,
        )
    }

    fn with(
        missing: &BTreeMap<u64, BTreeMap<u64, u64>>,
        store: ReceivedPages,
        form: Form,
        pages_max: u64,
    ) -> Pair {
        let ahead = Ahead::new(Missing(missing.clone()), store, PAGE, Instant::now());
        let (asked, says) = (Vec::new(), VecDeque::new());
        let source = Source {
            missing: missing.clone(),
            form,
            pages_max,
            asked,
            says,
        };
        Pair {
            ahead,
            engine: Engine::new(missing, form),
            source,
            room: usize::MAX,
        }
    }

    fn engine_says(&mut self, words: Option<Vec<u8>>) {
        if let Some(words) = words {
            self.ahead.engine_says(&words);
            self.pass();
        }
    }

    /// Delivers this number of bytes from the source to the proxy, and advances the clock.
    fn arrives(&mut self, bytes: usize) {
        self.ahead
            .tell_time(self.ahead.now + Duration::from_micros(bytes as u64 % 20_000));
        self.pass();
        let mut left = bytes.min(self.source.says.len());
        while left > 0 {
            let room = self.ahead.room();
            let now = room.len().min(left);
            room[..now].fill_with(|| self.source.says.pop_front().expect("it was counted"));
            self.ahead.came(now).expect("it says what it was asked");
            left -= now;
            self.pass();
        }
    }

    fn pass(&mut self) {
        loop {
            let mut said = Socket {
                bytes: Vec::new(),
                room: self.room,
            };
            self.ahead.answer(&mut said).expect("it is memory");
            self.engine.hear(&said.bytes);
            self.source.hear(&std::mem::take(self.ahead.questions()));
            if !self.ahead.is_blocked() {
                break;
            }
        }
        let in_turn = self.engine.open.iter().filter(|head| head.pages > 1);
        let may: u64 = in_turn.map(|head| head.pages).sum();
        assert!(self.ahead.pieces.len() as u64 <= PIECES_MAX as u64 + may);
        let pieces = self
            .ahead
            .asked
            .iter()
            .filter(|asked| asked.is_piece)
            .count();
        assert!(pieces <= UNDER_WAY_MAX + 1);
    }

    /// Runs until CRIU has everything and has sent PS_IOV_CLOSE.
    fn finish(&mut self) {
        let processes: Vec<u64> = self.engine.left.keys().copied().collect();
        while self.engine.left.values().any(|left| !left.is_empty()) || !self.engine.open.is_empty()
        {
            for process in &processes {
                let words = self.engine.in_turn(*process);
                self.engine_says(words);
            }
            self.arrives(usize::MAX);
        }
        let close = Head {
            command: CLOSE,
            pages: 0,
            address: 0,
            process: 0,
        };
        assert!(!self.ahead.has_all());
        self.engine_says(Some(self.source.form.write(&close)));
        assert!(self.ahead.has_all() && !self.ahead.has_parted());
        assert_eq!(self.ahead.rest_of_parting(), PARTING);
        self.arrives(usize::MAX);
        assert_eq!(self.engine.heard, PARTING);
        assert!(self.ahead.has_parted());
    }
}

fn stretches(lengths: &[(u64, u64)], begin: u64) -> BTreeMap<u64, u64> {
    let mut at = begin;
    let stretch = |(gap, pages): &(u64, u64)| {
        let start = at + gap * PAGE;
        at = start + pages * PAGE;
        (start, at)
    };
    lengths.iter().map(stretch).collect()
}

#[derive(Clone, Debug)]
enum Happens {
    InTurn(u64),
    Needed(u64, usize),
    Arrives(usize),
}

fn happens() -> impl Strategy<Value = Happens> {
    prop_oneof![
        3 => (1..=3u64).prop_map(Happens::InTurn),
        2 => (1..=3u64, any::<usize>()).prop_map(|(process, which)| Happens::Needed(process, which)),
        4 => (1..5000usize).prop_map(Happens::Arrives),
    ]
}

proptest! {
    /// CRIU receives each page exactly once, in the order of its requests, for any sequence of
    /// steps.
    #[test]
    fn engine_gets_each_page_once_in_order(
        lengths in prop::collection::vec(prop::collection::vec((0..3u64, 1..300u64), 1..6), 3),
        long in any::<bool>(),
        pages_max in prop_oneof![3 => Just(u64::MAX), 1 => 1..80u64],
        steps in prop::collection::vec(happens(), 0..200),
        room in prop_oneof![2 => Just(usize::MAX), 1 => 1..3000usize],
        came_before in any::<bool>(),
    ) {
        let missing = (1..).zip(lengths.iter().map(|lengths| stretches(lengths, 7 * PAGE))).collect();
        let form = if long { Form::Long } else { Form::Short };
        let store = if came_before { store(&missing) } else { ReceivedPages::with_page_size(PAGE) };
        let mut pair = Pair::with(&missing, store, form, pages_max);
        pair.room = room;
        for step in steps {
            match step {
                Happens::InTurn(process) => {
                    let words = pair.engine.in_turn(process);
                    pair.engine_says(words);
                }
                Happens::Needed(process, which) => {
                    let words = pair.engine.need(process, which);
                    pair.engine_says(words);
                }
                Happens::Arrives(bytes) => pair.arrives(bytes),
            }
        }
        pair.finish();
        let pages = |stretches: &BTreeMap<u64, u64>| stretches.iter().map(|(start, end)| (end - start) / PAGE).sum::<u64>();
        prop_assert_eq!(pair.engine.got.len() as u64, missing.values().map(pages).sum::<u64>());
    }
}

/// Background requests are answered at once, even while page faults interrupt them.
#[test]
fn background_requests_are_answered_at_once() {
    let missing = BTreeMap::from([(1, stretches(&[(0, 4000)], 64))]);
    let mut pair = Pair::new(&missing, Form::Long, u64::MAX);
    let words = pair.engine.in_turn(1);
    pair.engine_says(words);
    pair.arrives(usize::MAX);
    let mut waits = 0;
    for round in 0.. {
        if round % 3 == 0 {
            // A page fault in memory beyond the chunks in flight.
            let words = pair.engine.need(1, 1000);
            pair.engine_says(words);
            pair.arrives(usize::MAX);
        }
        let Some(words) = pair.engine.in_turn(1) else {
            break;
        };
        pair.engine_says(Some(words));
        waits += usize::from(!pair.engine.open.is_empty());
        pair.arrives(usize::MAX);
        if pair.engine.left[&1].len() < 1500 {
            break;
        }
    }
    assert_eq!(waits, 0);
}

/// Long background requests of many processes are requested from the source only once.
#[test]
fn long_background_requests_are_fetched_once() {
    let missing = (1..=20)
        .map(|process| (process, stretches(&[(0, 3000)], 64)))
        .collect();
    let mut pair = Pair::new(&missing, Form::Long, u64::MAX);
    pair.engine.pages_at_once = 1500;
    pair.finish();
    let asked: u64 = pair.source.asked.iter().map(|head| head.pages).sum();
    assert_eq!(asked, 20 * 3000);
}

/// Before the background transfer has started, only pages of page faults are requested.
#[test]
fn no_prefetch_before_background_transfer() {
    let missing = BTreeMap::from([(1, stretches(&[(0, 4000)], 64))]);
    let mut pair = Pair::new(&missing, Form::Long, u64::MAX);
    for _ in 0..5 {
        let words = pair.engine.need(1, 1000);
        pair.engine_says(words);
        pair.arrives(usize::MAX);
    }
    assert!(
        pair.source.asked.iter().all(|head| head.pages == 1),
        "{:?}",
        pair.source.asked
    );
}

/// Messages that are not requests for missing pages pass unchanged in both directions.
#[test]
fn unknown_messages_pass_unchanged() {
    for words in [
        &b"anything"[..],
        &[7; 100],
        &Form::Long.write(&Head {
            command: GET,
            pages: 1,
            address: 0,
            process: 9,
        }),
    ] {
        let missing = BTreeMap::from([(1, stretches(&[(0, 40)], 64))]);
        let mut ahead = Ahead::new(
            Missing(missing),
            ReceivedPages::with_page_size(PAGE),
            PAGE,
            Instant::now(),
        );
        for _ in 0..2 {
            ahead.engine_says(words);
            assert_eq!(std::mem::take(ahead.questions()), words);
            ahead.room()[..3].copy_from_slice(b"yes");
            ahead.came(3).expect("it passes");
            let mut said = Vec::new();
            ahead.answer(&mut said).expect("it is memory");
            assert_eq!(said, b"yes");
        }
        assert!(ahead.has_taken_leave() && !ahead.has_all());
    }
}

/// A reply that does not fit the request is an error.
#[test]
fn unexpected_reply_is_an_error() {
    let missing = BTreeMap::from([(1, stretches(&[(0, 40)], 64))]);
    let asked = Head {
        command: GET,
        pages: 4,
        address: 64,
        process: 1,
    };
    let right = Head {
        command: PRESENT << FLAGS_SHIFT | ADD,
        pages: 40,
        ..asked
    };
    for wrong in [
        Head {
            command: ADD,
            ..right
        },
        Head {
            address: 80,
            ..right
        },
        Head {
            process: 2,
            ..right
        },
        Head { pages: 41, ..right },
        Head { pages: 0, ..right },
    ] {
        let mut ahead = Ahead::new(
            Missing(missing.clone()),
            ReceivedPages::with_page_size(PAGE),
            PAGE,
            Instant::now(),
        );
        ahead.engine_says(&Form::Long.write(&asked));
        ahead.room().copy_from_slice(&Form::Long.write(&wrong));
        ahead
            .came(Form::Long.bytes())
            .expect_err("it was not asked that");
    }
}

/// After a pre-copy only changed pages are requested, and pre-copied memory is freed after use.
#[test]
fn only_changed_pages_are_transferred_again() {
    let missing = BTreeMap::from([(1, stretches(&[(0, 4000)], 0))]);
    let mut pair = Pair::with(&missing, store(&missing), Form::Long, u64::MAX);
    let said = |pair: &Pair| {
        pair.source
            .asked
            .iter()
            .map(|head| (head.command, head.pages))
            .collect::<Vec<_>>()
    };
    let words = pair.engine.need(1, 17);
    pair.engine_says(words);
    pair.arrives(usize::MAX);
    assert_eq!(
        said(&pair),
        [(GET_CHANGED, 1)],
        "also of what the task needs"
    );
    pair.finish();
    let all = said(&pair);
    assert!(
        all.iter().all(|(command, _)| *command == GET_CHANGED),
        "{all:?}"
    );
    assert!(
        pair.ahead.store.bytes() < BLOCK_PAGES * PAGE,
        "nothing is kept that was used"
    );
    assert_eq!(pair.engine.got.len(), 4000);
}

/// A reply to a request for changed pages that does not fit the request is an error.
#[test]
fn unexpected_changed_reply_is_an_error() {
    let missing = BTreeMap::from([(1, stretches(&[(0, 40)], 0))]);
    let asked = Head {
        command: GET,
        pages: 4,
        address: 0,
        process: 1,
    };
    let right = Head {
        command: CHANGED,
        ..asked
    };
    let ask = |store: ReceivedPages, answer: Head| {
        let mut ahead = Ahead::new(Missing(missing.clone()), store, PAGE, Instant::now());
        ahead.engine_says(&Form::Long.write(&asked));
        let first = Form::Long.read(ahead.questions());
        ahead.room().copy_from_slice(&Form::Long.write(&Head {
            pages: answer.pages.min(first.pages),
            ..answer
        }));
        ahead.came(Form::Long.bytes()).map(|()| first)
    };
    let whole = Head {
        pages: u64::MAX,
        ..right
    };
    assert_eq!(
        ask(store(&missing), whole).expect("that was asked").command,
        GET_CHANGED
    );
    for wrong in [
        Head { pages: 1, ..right },
        Head {
            address: 16,
            ..whole
        },
        Head {
            command: PRESENT << FLAGS_SHIFT | ADD,
            ..whole
        },
    ] {
        ask(store(&missing), wrong).expect_err("it was not asked that");
    }
    ask(ReceivedPages::with_page_size(PAGE), whole).expect_err("nothing came before");
}
