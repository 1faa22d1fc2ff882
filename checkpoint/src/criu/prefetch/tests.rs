//! Tests the proxy between simulations of `criu lazy-pages` and the source.

use super::*;
use crate::engine::pages::BLOCK_PAGES;
use proptest::prelude::*;
use std::collections::BTreeSet;

const PAGE: u64 = 16;

/// Returns the content of a page: its process and address, so that all pages differ.
fn content(process: u64, address: u64) -> [u8; PAGE as usize] {
    [process.to_ne_bytes(), address.to_ne_bytes()]
        .concat()
        .try_into()
        .expect("two numbers")
}

/// What was pre-copied of a page: nothing, its current content, or older content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PreCopyState {
    Nothing,
    Same,
    Older,
}

/// Returns the pre-copy state of a page. The states are distributed over all pages.
fn pre_copy_state(process: u64, address: u64) -> PreCopyState {
    [
        PreCopyState::Same,
        PreCopyState::Same,
        PreCopyState::Older,
        PreCopyState::Same,
        PreCopyState::Nothing,
    ][((address / PAGE * 7 + process) % 5) as usize]
}

/// Returns the pages of this missing memory that were pre-copied.
fn store(missing: &BTreeMap<u64, BTreeMap<u64, u64>>) -> ReceivedPages {
    let mut pre_copied = ReceivedPages::with_page_size(PAGE);
    let ranges = missing
        .iter()
        .flat_map(|(process, ranges)| ranges.iter().map(|stretch| (*process, stretch)));
    for (process, address) in ranges.flat_map(|(process, (from, to))| {
        (*from..*to)
            .step_by(PAGE as usize)
            .map(move |at| (process, at))
    }) {
        let was = content(
            process,
            if pre_copy_state(process, address) == PreCopyState::Same {
                address
            } else {
                !address
            },
        );
        if pre_copy_state(process, address) != PreCopyState::Nothing {
            pre_copied
                .insert(process, address, &was)
                .expect("there is memory");
        }
    }
    pre_copied
}

/// A simulated source. It panics if a page is requested that is not missing. Its replies never
/// extend beyond the end of a missing range.
struct Source {
    missing: BTreeMap<u64, BTreeMap<u64, u64>>,
    form: HeaderLayout,
    /// Maximum number of pages in a reply.
    pages_max: u64,
    asked: Vec<PageHeader>,
    says: VecDeque<u8>,
}

impl Source {
    fn hear(&mut self, questions: &[u8]) {
        let layout = self.form;
        for head in questions
            .chunks(layout.bytes())
            .map(|bytes| layout.read(bytes))
        {
            if head.command == PS_IOV_CLOSE {
                self.says.extend(CLOSE_REPLY);
                continue;
            }
            assert!(matches!(head.command, PS_IOV_GET | GET_CHANGED));
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
            self.says.extend(self.form.write(&PageHeader {
                command: PE_PRESENT << PS_CMD_BITS | PS_IOV_ADD_F,
                pages,
                ..head
            }));
            for page in 0..pages {
                self.says
                    .extend(content(head.process, head.address + page * PAGE));
            }
        }
    }

    fn says_what_has_changed(&mut self, head: &PageHeader) {
        self.says.extend(self.form.write(&PageHeader {
            command: CHANGED_PAGES,
            ..*head
        }));
        let addresses = (0..head.pages).map(|page| head.address + page * PAGE);
        let comes: Vec<(u64, bool)> = addresses
            .map(|address| {
                (
                    address,
                    pre_copy_state(head.process, address) != PreCopyState::Same,
                )
            })
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

/// A simulated `criu lazy-pages`: a background transfer from low to high addresses, with one open
/// request for each process, and requests for single pages at any time.
struct Engine {
    form: HeaderLayout,
    /// Addresses of the pages of each process that were not requested yet, by process.
    left: BTreeMap<u64, BTreeSet<u64>>,
    /// Unanswered requests in the order in which they were sent.
    open: VecDeque<PageHeader>,
    heard: Vec<u8>,
    pages_at_once: u64,
    got: BTreeSet<(u64, u64)>,
}

impl Engine {
    fn new(missing: &BTreeMap<u64, BTreeMap<u64, u64>>, layout: HeaderLayout) -> Engine {
        let pages = |ranges: &BTreeMap<u64, u64>| {
            ranges
                .iter()
                .flat_map(|(start, end)| (*start..*end).step_by(PAGE as usize))
                .collect()
        };
        let left = missing
            .iter()
            .map(|(process, ranges)| (*process, pages(ranges)))
            .collect();
        Engine {
            form: layout,
            left,
            open: VecDeque::new(),
            heard: Vec::new(),
            pages_at_once: 4,
            got: BTreeSet::new(),
        }
    }

    fn ask(&mut self, process: u64, address: u64, pages: u64) -> Vec<u8> {
        let head = PageHeader {
            command: PS_IOV_GET,
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
    fn background_request(&mut self, process: u64) -> Option<Vec<u8>> {
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

    /// Returns a request for a page fault at a page that was not requested yet.
    fn fault_request(&mut self, process: u64, which: usize) -> Option<Vec<u8>> {
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
            assert_eq!(head.command, PE_PRESENT << PS_CMD_BITS | PS_IOV_ADD_F);
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

/// A simulated socket of CRIU that accepts at most `room` bytes.
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
    ahead: Prefetcher,
    engine: Engine,
    source: Source,
    /// Maximum number of bytes that CRIU accepts at once.
    room: usize,
}

impl Pair {
    fn new(
        missing: &BTreeMap<u64, BTreeMap<u64, u64>>,
        layout: HeaderLayout,
        pages_max: u64,
    ) -> Pair {
        Pair::with(
            missing,
            ReceivedPages::with_page_size(PAGE),
            layout,
            pages_max,
        )
    }

    fn with(
        missing: &BTreeMap<u64, BTreeMap<u64, u64>>,
        pre_copied: ReceivedPages,
        layout: HeaderLayout,
        pages_max: u64,
    ) -> Pair {
        let prefetcher = Prefetcher::new(
            MissingMemory(missing.clone()),
            pre_copied,
            PAGE,
            Instant::now(),
        );
        let (asked, says) = (Vec::new(), VecDeque::new());
        let source = Source {
            missing: missing.clone(),
            form: layout,
            pages_max,
            asked,
            says,
        };
        Pair {
            ahead: prefetcher,
            engine: Engine::new(missing, layout),
            source,
            room: usize::MAX,
        }
    }

    fn engine_says(&mut self, words: Option<Vec<u8>>) {
        if let Some(words) = words {
            self.ahead.receive_from_engine(&words);
            self.pass();
        }
    }

    /// Delivers at most `bytes` bytes from the source to the proxy, and advances the clock.
    fn arrives(&mut self, bytes: usize) {
        self.ahead
            .set_now(self.ahead.now + Duration::from_micros(bytes as u64 % 20_000));
        self.pass();
        let mut left = bytes.min(self.source.says.len());
        while left > 0 {
            let room = self.ahead.receive_buffer();
            let now = room.len().min(left);
            room[..now].fill_with(|| self.source.says.pop_front().expect("it was counted"));
            self.ahead
                .receive_from_source(now)
                .expect("it says what it was asked");
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
            self.ahead.write_replies(&mut said).expect("it is memory");
            self.engine.hear(&said.bytes);
            self.source
                .hear(&std::mem::take(self.ahead.bytes_for_source()));
            if !self.ahead.is_blocked() {
                break;
            }
        }
        let in_turn = self.engine.open.iter().filter(|head| head.pages > 1);
        let may: u64 = in_turn.map(|head| head.pages).sum();
        assert!(self.ahead.chunks.len() as u64 <= CHUNKS_MAX as u64 + may);
        let pieces = self
            .ahead
            .in_flight
            .iter()
            .filter(|asked| asked.is_chunk)
            .count();
        assert!(pieces <= IN_FLIGHT_MAX + 1);
    }

    /// Runs until CRIU has all memory and has sent PS_IOV_CLOSE.
    fn finish(&mut self) {
        let processes: Vec<u64> = self.engine.left.keys().copied().collect();
        while self.engine.left.values().any(|left| !left.is_empty()) || !self.engine.open.is_empty()
        {
            for process in &processes {
                let words = self.engine.background_request(*process);
                self.engine_says(words);
            }
            self.arrives(usize::MAX);
        }
        let close = PageHeader {
            command: PS_IOV_CLOSE,
            pages: 0,
            address: 0,
            process: 0,
        };
        assert!(!self.ahead.engine_has_all());
        self.engine_says(Some(self.source.form.write(&close)));
        assert!(self.ahead.engine_has_all() && !self.ahead.is_finished());
        assert_eq!(self.ahead.missing_close_reply(), CLOSE_REPLY);
        self.arrives(usize::MAX);
        assert_eq!(self.engine.heard, CLOSE_REPLY);
        assert!(self.ahead.is_finished());
    }
}

fn ranges(lengths: &[(u64, u64)], begin: u64) -> BTreeMap<u64, u64> {
    let mut at = begin;
    let stretch = |(gap, pages): &(u64, u64)| {
        let start = at + gap * PAGE;
        at = start + pages * PAGE;
        (start, at)
    };
    lengths.iter().map(stretch).collect()
}

#[derive(Clone, Debug)]
enum Step {
    Background(u64),
    Fault(u64, usize),
    Arrives(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (1..=3u64).prop_map(Step::Background),
        2 => (1..=3u64, any::<usize>()).prop_map(|(process, which)| Step::Fault(process, which)),
        4 => (1..5000usize).prop_map(Step::Arrives),
    ]
}

proptest! {
    /// For any sequence of steps, CRIU receives each page exactly once, in the order of its
    /// requests.
    #[test]
    fn engine_gets_each_page_once_in_order(
        lengths in prop::collection::vec(prop::collection::vec((0..3u64, 1..300u64), 1..6), 3),
        long in any::<bool>(),
        pages_max in prop_oneof![3 => Just(u64::MAX), 1 => 1..80u64],
        steps in prop::collection::vec(step(), 0..200),
        room in prop_oneof![2 => Just(usize::MAX), 1 => 1..3000usize],
        came_before in any::<bool>(),
    ) {
        let missing = (1..).zip(lengths.iter().map(|lengths| ranges(lengths, 7 * PAGE))).collect();
        let layout = if long { HeaderLayout::Long } else { HeaderLayout::Short };
        let pre_copied = if came_before { store(&missing) } else { ReceivedPages::with_page_size(PAGE) };
        let mut pair = Pair::with(&missing, pre_copied, layout, pages_max);
        pair.room = room;
        for step in steps {
            match step {
                Step::Background(process) => {
                    let words = pair.engine.background_request(process);
                    pair.engine_says(words);
                }
                Step::Fault(process, which) => {
                    let words = pair.engine.fault_request(process, which);
                    pair.engine_says(words);
                }
                Step::Arrives(bytes) => pair.arrives(bytes),
            }
        }
        pair.finish();
        let pages = |ranges: &BTreeMap<u64, u64>| ranges.iter().map(|(start, end)| (end - start) / PAGE).sum::<u64>();
        prop_assert_eq!(pair.engine.got.len() as u64, missing.values().map(pages).sum::<u64>());
    }
}

/// Background requests are answered from stored chunks, even while page faults interrupt them.
#[test]
fn background_requests_are_answered_at_once() {
    let missing = BTreeMap::from([(1, ranges(&[(0, 4000)], 64))]);
    let mut pair = Pair::new(&missing, HeaderLayout::Long, u64::MAX);
    let words = pair.engine.background_request(1);
    pair.engine_says(words);
    pair.arrives(usize::MAX);
    let mut waits = 0;
    for round in 0.. {
        if round % 3 == 0 {
            // A page fault in memory beyond the chunks in flight.
            let words = pair.engine.fault_request(1, 1000);
            pair.engine_says(words);
            pair.arrives(usize::MAX);
        }
        let Some(words) = pair.engine.background_request(1) else {
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
        .map(|process| (process, ranges(&[(0, 3000)], 64)))
        .collect();
    let mut pair = Pair::new(&missing, HeaderLayout::Long, u64::MAX);
    pair.engine.pages_at_once = 1500;
    pair.finish();
    let asked: u64 = pair.source.asked.iter().map(|head| head.pages).sum();
    assert_eq!(asked, 20 * 3000);
}

/// Before the background transfer has started, only pages of page faults are requested.
#[test]
fn no_prefetch_before_background_transfer() {
    let missing = BTreeMap::from([(1, ranges(&[(0, 4000)], 64))]);
    let mut pair = Pair::new(&missing, HeaderLayout::Long, u64::MAX);
    for _ in 0..5 {
        let words = pair.engine.fault_request(1, 1000);
        pair.engine_says(words);
        pair.arrives(usize::MAX);
    }
    assert!(
        pair.source.asked.iter().all(|head| head.pages == 1),
        "{:?}",
        pair.source.asked
    );
}

/// Messages that are not requests for missing pages are forwarded unchanged in both directions.
#[test]
fn unknown_messages_pass_unchanged() {
    for words in [
        &b"anything"[..],
        &[7; 100],
        &HeaderLayout::Long.write(&PageHeader {
            command: PS_IOV_GET,
            pages: 1,
            address: 0,
            process: 9,
        }),
    ] {
        let missing = BTreeMap::from([(1, ranges(&[(0, 40)], 64))]);
        let mut prefetcher = Prefetcher::new(
            MissingMemory(missing),
            ReceivedPages::with_page_size(PAGE),
            PAGE,
            Instant::now(),
        );
        for _ in 0..2 {
            prefetcher.receive_from_engine(words);
            assert_eq!(std::mem::take(prefetcher.bytes_for_source()), words);
            prefetcher.receive_buffer()[..3].copy_from_slice(b"yes");
            prefetcher.receive_from_source(3).expect("it passes");
            let mut said = Vec::new();
            prefetcher.write_replies(&mut said).expect("it is memory");
            assert_eq!(said, b"yes");
        }
        assert!(prefetcher.engine_is_done() && !prefetcher.engine_has_all());
    }
}

/// A reply that does not match the request is an error.
#[test]
fn unexpected_reply_is_an_error() {
    let missing = BTreeMap::from([(1, ranges(&[(0, 40)], 64))]);
    let asked = PageHeader {
        command: PS_IOV_GET,
        pages: 4,
        address: 64,
        process: 1,
    };
    let right = PageHeader {
        command: PE_PRESENT << PS_CMD_BITS | PS_IOV_ADD_F,
        pages: 40,
        ..asked
    };
    for wrong in [
        PageHeader {
            command: PS_IOV_ADD_F,
            ..right
        },
        PageHeader {
            address: 80,
            ..right
        },
        PageHeader {
            process: 2,
            ..right
        },
        PageHeader { pages: 41, ..right },
        PageHeader { pages: 0, ..right },
    ] {
        let mut prefetcher = Prefetcher::new(
            MissingMemory(missing.clone()),
            ReceivedPages::with_page_size(PAGE),
            PAGE,
            Instant::now(),
        );
        prefetcher.receive_from_engine(&HeaderLayout::Long.write(&asked));
        prefetcher
            .receive_buffer()
            .copy_from_slice(&HeaderLayout::Long.write(&wrong));
        prefetcher
            .receive_from_source(HeaderLayout::Long.bytes())
            .expect_err("it was not asked that");
    }
}

/// After a pre-copy only changed pages are transferred, and pre-copied memory is freed after use.
#[test]
fn only_changed_pages_are_transferred_again() {
    let missing = BTreeMap::from([(1, ranges(&[(0, 4000)], 0))]);
    let mut pair = Pair::with(&missing, store(&missing), HeaderLayout::Long, u64::MAX);
    let said = |pair: &Pair| {
        pair.source
            .asked
            .iter()
            .map(|head| (head.command, head.pages))
            .collect::<Vec<_>>()
    };
    let words = pair.engine.fault_request(1, 17);
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
        pair.ahead.pre_copied.bytes() < BLOCK_PAGES * PAGE,
        "nothing is kept that was used"
    );
    assert_eq!(pair.engine.got.len(), 4000);
}

/// A reply to [`GET_CHANGED`] that does not match the request is an error.
#[test]
fn unexpected_changed_reply_is_an_error() {
    let missing = BTreeMap::from([(1, ranges(&[(0, 40)], 0))]);
    let asked = PageHeader {
        command: PS_IOV_GET,
        pages: 4,
        address: 0,
        process: 1,
    };
    let right = PageHeader {
        command: CHANGED_PAGES,
        ..asked
    };
    let ask = |pre_copied: ReceivedPages, answer: PageHeader| {
        let mut prefetcher = Prefetcher::new(
            MissingMemory(missing.clone()),
            pre_copied,
            PAGE,
            Instant::now(),
        );
        prefetcher.receive_from_engine(&HeaderLayout::Long.write(&asked));
        let first = HeaderLayout::Long.read(prefetcher.bytes_for_source());
        prefetcher
            .receive_buffer()
            .copy_from_slice(&HeaderLayout::Long.write(&PageHeader {
                pages: answer.pages.min(first.pages),
                ..answer
            }));
        prefetcher
            .receive_from_source(HeaderLayout::Long.bytes())
            .map(|()| first)
    };
    let whole = PageHeader {
        pages: u64::MAX,
        ..right
    };
    assert_eq!(
        ask(store(&missing), whole).expect("that was asked").command,
        GET_CHANGED
    );
    for wrong in [
        PageHeader { pages: 1, ..right },
        PageHeader {
            address: 16,
            ..whole
        },
        PageHeader {
            command: PE_PRESENT << PS_CMD_BITS | PS_IOV_ADD_F,
            ..whole
        },
    ] {
        ask(store(&missing), wrong).expect_err("it was not asked that");
    }
    ask(ReceivedPages::with_page_size(PAGE), whole).expect_err("nothing came before");
}
