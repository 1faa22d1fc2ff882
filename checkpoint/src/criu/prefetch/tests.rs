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

/// Pre-copied content of a page: none, the current content, or older content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PreCopyState {
    NotSent,
    CurrentContent,
    OlderContent,
}

/// Returns the pre-copy state of a page. The states are distributed over all pages.
fn pre_copy_state(process: u64, address: u64) -> PreCopyState {
    [
        PreCopyState::CurrentContent,
        PreCopyState::CurrentContent,
        PreCopyState::OlderContent,
        PreCopyState::CurrentContent,
        PreCopyState::NotSent,
    ][((address / PAGE * 7 + process) % 5) as usize]
}

/// Returns the pages of this missing memory that were pre-copied.
fn pre_copied_pages(missing: &BTreeMap<u64, BTreeMap<u64, u64>>) -> ReceivedPages {
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
            if pre_copy_state(process, address) == PreCopyState::CurrentContent {
                address
            } else {
                !address
            },
        );
        if pre_copy_state(process, address) != PreCopyState::NotSent {
            pre_copied
                .insert(process, address, &was)
                .expect("there is memory");
        }
    }
    pre_copied
}

/// A simulated source. It panics if a page is requested that is not missing. Its replies never
/// extend beyond the end of a missing range.
struct SimulatedSource {
    missing: BTreeMap<u64, BTreeMap<u64, u64>>,
    layout: HeaderLayout,
    /// Maximum number of pages in a reply.
    pages_max: u64,
    requests: Vec<PageHeader>,
    outgoing_bytes: VecDeque<u8>,
}

impl SimulatedSource {
    fn receive_requests(&mut self, questions: &[u8]) {
        let layout = self.layout;
        for head in questions
            .chunks(layout.bytes())
            .map(|bytes| layout.read(bytes))
        {
            if head.command == PS_IOV_CLOSE {
                self.outgoing_bytes.extend(CLOSE_REPLY);
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
                self.reply_with_changed_pages(&head);
                self.requests.push(head);
                continue;
            }
            let pages = head
                .pages
                .min((end - head.address) / PAGE)
                .min(self.pages_max);
            self.requests.push(head);
            self.outgoing_bytes.extend(self.layout.write(&PageHeader {
                command: PE_PRESENT << PS_CMD_BITS | PS_IOV_ADD_F,
                pages,
                ..head
            }));
            for page in 0..pages {
                self.outgoing_bytes
                    .extend(content(head.process, head.address + page * PAGE));
            }
        }
    }

    fn reply_with_changed_pages(&mut self, head: &PageHeader) {
        self.outgoing_bytes.extend(self.layout.write(&PageHeader {
            command: CHANGED_PAGES,
            ..*head
        }));
        let addresses = (0..head.pages).map(|page| head.address + page * PAGE);
        let comes: Vec<(u64, bool)> = addresses
            .map(|address| {
                (
                    address,
                    pre_copy_state(head.process, address) != PreCopyState::CurrentContent,
                )
            })
            .collect();
        for eight in comes.chunks(8) {
            self.outgoing_bytes.push_back(
                eight
                    .iter()
                    .rev()
                    .fold(0, |byte, (_, comes)| byte << 1 | u8::from(*comes)),
            );
        }
        for (address, _) in comes.iter().filter(|(_, comes)| *comes) {
            self.outgoing_bytes.extend(content(head.process, *address));
        }
    }
}

/// A simulated `criu lazy-pages`: a background transfer from low to high addresses, with one open
/// request for each process, and requests for single pages at any time.
struct SimulatedEngine {
    layout: HeaderLayout,
    /// Addresses of the pages of each process that were not requested yet, by process.
    unrequested_pages: BTreeMap<u64, BTreeSet<u64>>,
    /// Unanswered requests in the order in which they were sent.
    open_requests: VecDeque<PageHeader>,
    received_bytes: Vec<u8>,
    background_pages_max: u64,
    received_pages: BTreeSet<(u64, u64)>,
}

impl SimulatedEngine {
    fn new(missing: &BTreeMap<u64, BTreeMap<u64, u64>>, layout: HeaderLayout) -> SimulatedEngine {
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
        SimulatedEngine {
            layout,
            unrequested_pages: left,
            open_requests: VecDeque::new(),
            received_bytes: Vec::new(),
            background_pages_max: 4,
            received_pages: BTreeSet::new(),
        }
    }

    fn request(&mut self, process: u64, address: u64, pages: u64) -> Vec<u8> {
        let head = PageHeader {
            command: PS_IOV_GET,
            pages,
            address,
            process,
        };
        let left = self
            .unrequested_pages
            .get_mut(&process)
            .expect("it misses something");
        for page in 0..pages {
            left.remove(&(address + page * PAGE));
        }
        self.open_requests.push_back(head);
        self.layout.write(&head)
    }

    /// Returns the next request of the background transfer.
    fn background_request(&mut self, process: u64) -> Option<Vec<u8>> {
        let is_open = self
            .open_requests
            .iter()
            .any(|head| head.process == process && head.pages > 1);
        let left = &self.unrequested_pages[&process];
        let first = *left.first().filter(|_| !is_open)?;
        let follow =
            (0..self.background_pages_max).take_while(|page| left.contains(&(first + page * PAGE)));
        let pages = follow.count() as u64;
        self.background_pages_max = (self.background_pages_max + 4).min(200);
        Some(self.request(process, first, pages))
    }

    /// Returns a request for a page fault at a page that was not requested yet.
    fn fault_request(&mut self, process: u64, which: usize) -> Option<Vec<u8>> {
        let left = &self.unrequested_pages[&process];
        let address = *left.iter().nth(which % left.len().max(1))?;
        self.background_pages_max = 4;
        Some(self.request(process, address, 1))
    }

    fn receive(&mut self, bytes: &[u8]) {
        self.received_bytes.extend(bytes);
        while self.received_bytes.len() >= self.layout.bytes() && !self.open_requests.is_empty() {
            let head = self.layout.read(&self.received_bytes);
            let length = self.layout.bytes() + (head.pages * PAGE) as usize;
            if self.received_bytes.len() < length {
                return;
            }
            let open = self.open_requests.pop_front().expect("it has asked");
            assert_eq!(head.command, PE_PRESENT << PS_CMD_BITS | PS_IOV_ADD_F);
            assert_eq!((head.process, head.address), (open.process, open.address));
            assert!(
                (1..=open.pages).contains(&head.pages),
                "{head:?} for {open:?}"
            );
            let body: Vec<u8> = self
                .received_bytes
                .drain(..length)
                .skip(self.layout.bytes())
                .collect();
            for (page, bytes) in body.chunks(PAGE as usize).enumerate() {
                let address = head.address + page as u64 * PAGE;
                assert_eq!(bytes, content(head.process, address));
                assert!(self.received_pages.insert((head.process, address)), "twice");
            }
            for page in head.pages..open.pages {
                self.unrequested_pages
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
    free_bytes: usize,
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(self.free_bytes);
        self.free_bytes -= taken;
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

struct ProxySimulation {
    prefetcher: Prefetcher,
    engine: SimulatedEngine,
    source: SimulatedSource,
    /// Maximum number of bytes that CRIU accepts at once.
    engine_buffer_bytes: usize,
}

impl ProxySimulation {
    fn new(
        missing: &BTreeMap<u64, BTreeMap<u64, u64>>,
        layout: HeaderLayout,
        pages_max: u64,
    ) -> ProxySimulation {
        ProxySimulation::with_pre_copied(
            missing,
            ReceivedPages::with_page_size(PAGE),
            layout,
            pages_max,
        )
    }

    fn with_pre_copied(
        missing: &BTreeMap<u64, BTreeMap<u64, u64>>,
        pre_copied: ReceivedPages,
        layout: HeaderLayout,
        pages_max: u64,
    ) -> ProxySimulation {
        let prefetcher = Prefetcher::new(
            MissingMemory(missing.clone()),
            pre_copied,
            PAGE,
            Instant::now(),
        );
        let (asked, says) = (Vec::new(), VecDeque::new());
        let source = SimulatedSource {
            missing: missing.clone(),
            layout,
            pages_max,
            requests: asked,
            outgoing_bytes: says,
        };
        ProxySimulation {
            prefetcher,
            engine: SimulatedEngine::new(missing, layout),
            source,
            engine_buffer_bytes: usize::MAX,
        }
    }

    fn send_from_engine(&mut self, words: Option<Vec<u8>>) {
        if let Some(words) = words {
            self.prefetcher.receive_from_engine(&words);
            self.exchange_data();
        }
    }

    /// Delivers at most `bytes` bytes from the source to the proxy, and advances the clock.
    fn deliver_from_source(&mut self, bytes: usize) {
        self.prefetcher
            .set_now(self.prefetcher.now + Duration::from_micros(bytes as u64 % 20_000));
        self.exchange_data();
        let mut left = bytes.min(self.source.outgoing_bytes.len());
        while left > 0 {
            let room = self.prefetcher.receive_buffer();
            let now = room.len().min(left);
            room[..now].fill_with(|| {
                self.source
                    .outgoing_bytes
                    .pop_front()
                    .expect("it was counted")
            });
            self.prefetcher
                .receive_from_source(now)
                .expect("it says what it was asked");
            left -= now;
            self.exchange_data();
        }
    }

    fn exchange_data(&mut self) {
        loop {
            let mut said = Socket {
                bytes: Vec::new(),
                free_bytes: self.engine_buffer_bytes,
            };
            self.prefetcher
                .write_replies(&mut said)
                .expect("it is memory");
            self.engine.receive(&said.bytes);
            self.source
                .receive_requests(&std::mem::take(self.prefetcher.bytes_for_source()));
            if !self.prefetcher.is_blocked() {
                break;
            }
        }
        let in_turn = self
            .engine
            .open_requests
            .iter()
            .filter(|head| head.pages > 1);
        let may: u64 = in_turn.map(|head| head.pages).sum();
        assert!(self.prefetcher.chunks.len() as u64 <= CHUNKS_MAX as u64 + may);
        let pieces = self
            .prefetcher
            .in_flight
            .iter()
            .filter(|asked| asked.is_chunk)
            .count();
        assert!(pieces <= IN_FLIGHT_MAX + 1);
    }

    /// Runs until CRIU has all memory and has sent PS_IOV_CLOSE.
    fn finish(&mut self) {
        let processes: Vec<u64> = self.engine.unrequested_pages.keys().copied().collect();
        while self
            .engine
            .unrequested_pages
            .values()
            .any(|left| !left.is_empty())
            || !self.engine.open_requests.is_empty()
        {
            for process in &processes {
                let words = self.engine.background_request(*process);
                self.send_from_engine(words);
            }
            self.deliver_from_source(usize::MAX);
        }
        let close = PageHeader {
            command: PS_IOV_CLOSE,
            pages: 0,
            address: 0,
            process: 0,
        };
        assert!(!self.prefetcher.engine_has_all_memory());
        self.send_from_engine(Some(self.source.layout.write(&close)));
        assert!(self.prefetcher.engine_has_all_memory() && !self.prefetcher.is_finished());
        assert_eq!(self.prefetcher.missing_close_reply(), CLOSE_REPLY);
        self.deliver_from_source(usize::MAX);
        assert_eq!(self.engine.received_bytes, CLOSE_REPLY);
        assert!(self.prefetcher.is_finished());
    }
}

fn missing_ranges(lengths: &[(u64, u64)], begin: u64) -> BTreeMap<u64, u64> {
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
    PageFault(u64, usize),
    DeliverFromSource(usize),
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (1..=3u64).prop_map(Step::Background),
        2 => (1..=3u64, any::<usize>()).prop_map(|(process, which)| Step::PageFault(process, which)),
        4 => (1..5000usize).prop_map(Step::DeliverFromSource),
    ]
}

proptest! {
    /// For any sequence of steps, CRIU receives each page exactly once, in the order of its
    /// requests.
    #[test]
    fn engine_gets_each_page_once_in_order(
        lengths in prop::collection::vec(prop::collection::vec((0..3u64, 1..300u64), 1..6), 3),
        long_layout in any::<bool>(),
        pages_max in prop_oneof![3 => Just(u64::MAX), 1 => 1..80u64],
        steps in prop::collection::vec(any_step(), 0..200),
        room in prop_oneof![2 => Just(usize::MAX), 1 => 1..3000usize],
        with_pre_copy in any::<bool>(),
    ) {
        let missing = (1..).zip(lengths.iter().map(|lengths| missing_ranges(lengths, 7 * PAGE))).collect();
        let layout = if long_layout { HeaderLayout::Long } else { HeaderLayout::Short };
        let pre_copied = if with_pre_copy { pre_copied_pages(&missing) } else { ReceivedPages::with_page_size(PAGE) };
        let mut pair = ProxySimulation::with_pre_copied(&missing, pre_copied, layout, pages_max);
        pair.engine_buffer_bytes = room;
        for step in steps {
            match step {
                Step::Background(process) => {
                    let words = pair.engine.background_request(process);
                    pair.send_from_engine(words);
                }
                Step::PageFault(process, which) => {
                    let words = pair.engine.fault_request(process, which);
                    pair.send_from_engine(words);
                }
                Step::DeliverFromSource(bytes) => pair.deliver_from_source(bytes),
            }
        }
        pair.finish();
        let pages = |ranges: &BTreeMap<u64, u64>| ranges.iter().map(|(start, end)| (end - start) / PAGE).sum::<u64>();
        prop_assert_eq!(pair.engine.received_pages.len() as u64, missing.values().map(pages).sum::<u64>());
    }
}

/// Background requests are answered from stored chunks, even while page faults interrupt them.
#[test]
fn background_requests_are_answered_at_once() {
    let missing = BTreeMap::from([(1, missing_ranges(&[(0, 4000)], 64))]);
    let mut pair = ProxySimulation::new(&missing, HeaderLayout::Long, u64::MAX);
    let words = pair.engine.background_request(1);
    pair.send_from_engine(words);
    pair.deliver_from_source(usize::MAX);
    let mut waits = 0;
    for round in 0.. {
        if round % 3 == 0 {
            // A page fault in memory beyond the chunks in flight.
            let words = pair.engine.fault_request(1, 1000);
            pair.send_from_engine(words);
            pair.deliver_from_source(usize::MAX);
        }
        let Some(words) = pair.engine.background_request(1) else {
            break;
        };
        pair.send_from_engine(Some(words));
        waits += usize::from(!pair.engine.open_requests.is_empty());
        pair.deliver_from_source(usize::MAX);
        if pair.engine.unrequested_pages[&1].len() < 1500 {
            break;
        }
    }
    assert_eq!(waits, 0);
}

/// Long background requests of many processes are requested from the source only once.
#[test]
fn long_background_requests_are_fetched_once() {
    let missing = (1..=20)
        .map(|process| (process, missing_ranges(&[(0, 3000)], 64)))
        .collect();
    let mut pair = ProxySimulation::new(&missing, HeaderLayout::Long, u64::MAX);
    pair.engine.background_pages_max = 1500;
    pair.finish();
    let asked: u64 = pair.source.requests.iter().map(|head| head.pages).sum();
    assert_eq!(asked, 20 * 3000);
}

/// Before the background transfer has started, only pages of page faults are requested.
#[test]
fn no_prefetch_before_background_transfer() {
    let missing = BTreeMap::from([(1, missing_ranges(&[(0, 4000)], 64))]);
    let mut pair = ProxySimulation::new(&missing, HeaderLayout::Long, u64::MAX);
    for _ in 0..5 {
        let words = pair.engine.fault_request(1, 1000);
        pair.send_from_engine(words);
        pair.deliver_from_source(usize::MAX);
    }
    assert!(
        pair.source.requests.iter().all(|head| head.pages == 1),
        "{:?}",
        pair.source.requests
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
        let missing = BTreeMap::from([(1, missing_ranges(&[(0, 40)], 64))]);
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
        assert!(prefetcher.engine_is_done() && !prefetcher.engine_has_all_memory());
    }
}

/// A reply that does not match the request is an error.
#[test]
fn unexpected_reply_is_an_error() {
    let missing = BTreeMap::from([(1, missing_ranges(&[(0, 40)], 64))]);
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
    let missing = BTreeMap::from([(1, missing_ranges(&[(0, 4000)], 0))]);
    let mut pair = ProxySimulation::with_pre_copied(
        &missing,
        pre_copied_pages(&missing),
        HeaderLayout::Long,
        u64::MAX,
    );
    let said = |pair: &ProxySimulation| {
        pair.source
            .requests
            .iter()
            .map(|head| (head.command, head.pages))
            .collect::<Vec<_>>()
    };
    let words = pair.engine.fault_request(1, 17);
    pair.send_from_engine(words);
    pair.deliver_from_source(usize::MAX);
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
        pair.prefetcher.pre_copied.stored_bytes() < BLOCK_PAGES * PAGE,
        "nothing is kept that was used"
    );
    assert_eq!(pair.engine.received_pages.len(), 4000);
}

/// A reply to [`GET_CHANGED`] that does not match the request is an error.
#[test]
fn unexpected_changed_reply_is_an_error() {
    let missing = BTreeMap::from([(1, missing_ranges(&[(0, 40)], 0))]);
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
        ask(pre_copied_pages(&missing), whole)
            .expect("that was asked")
            .command,
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
        ask(pre_copied_pages(&missing), wrong).expect_err("it was not asked that");
    }
    ask(ReceivedPages::with_page_size(PAGE), whole).expect_err("nothing came before");
}
