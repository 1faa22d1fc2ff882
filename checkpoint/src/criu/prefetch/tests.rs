//! Tests the proxy with a simulated `criu lazy-pages` and a simulated source.

use super::*;
use crate::engine::pages::BLOCK_PAGES;
use proptest::prelude::*;
use std::collections::BTreeSet;

const PAGE_BYTES: u64 = 16;

/// Returns the content of a page. The content consists of the process and the address, so that all
/// pages differ.
fn page_content(namespace_pid: u64, address: u64) -> [u8; PAGE_BYTES as usize] {
    [namespace_pid.to_ne_bytes(), address.to_ne_bytes()]
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
fn pre_copy_state(namespace_pid: u64, address: u64) -> PreCopyState {
    [
        PreCopyState::CurrentContent,
        PreCopyState::CurrentContent,
        PreCopyState::OlderContent,
        PreCopyState::CurrentContent,
        PreCopyState::NotSent,
    ][((address / PAGE_BYTES * 7 + namespace_pid) % 5) as usize]
}

/// Returns the pages of this missing memory that were pre-copied.
fn pre_copied_pages(missing_memory: &BTreeMap<u64, BTreeMap<u64, u64>>) -> ReceivedPages {
    let mut received_pages = ReceivedPages::with_page_size(PAGE_BYTES);
    let ranges = missing_memory
        .iter()
        .flat_map(|(namespace_pid, ranges)| ranges.iter().map(|range| (*namespace_pid, range)));
    for (namespace_pid, address) in ranges.flat_map(|(namespace_pid, (start, end))| {
        (*start..*end)
            .step_by(PAGE_BYTES as usize)
            .map(move |page_address| (namespace_pid, page_address))
    }) {
        let copied_content = page_content(
            namespace_pid,
            if pre_copy_state(namespace_pid, address) == PreCopyState::CurrentContent {
                address
            } else {
                !address
            },
        );
        if pre_copy_state(namespace_pid, address) != PreCopyState::NotSent {
            received_pages
                .insert(namespace_pid, address, &copied_content)
                .expect("there is memory");
        }
    }
    received_pages
}

/// A simulated source. It panics if a page is requested that is not missing. Its replies never
/// extend beyond the end of a missing range.
struct SimulatedSource {
    missing_memory: BTreeMap<u64, BTreeMap<u64, u64>>,
    layout: HeaderLayout,
    /// Maximum number of pages in a reply.
    pages_max: u64,
    requests: Vec<PageHeader>,
    outgoing_bytes: VecDeque<u8>,
}

impl SimulatedSource {
    fn receive_requests(&mut self, request_bytes: &[u8]) {
        let layout = self.layout;
        for header in request_bytes
            .chunks(layout.bytes())
            .map(|bytes| layout.decode(bytes))
        {
            if header.command == PS_IOV_CLOSE {
                self.outgoing_bytes.extend(CLOSE_REPLY);
                continue;
            }
            assert!(matches!(header.command, PS_IOV_GET | GET_CHANGED));
            let range = self.missing_memory[&header.namespace_pid]
                .range(..=header.address)
                .next_back();
            let (_, &end) = range.expect("it is missing");
            assert!(header.address < end, "it is missing");
            if header.command == GET_CHANGED {
                assert!(header.page_count <= (end - header.address) / PAGE_BYTES);
                self.reply_with_changed_pages(&header);
                self.requests.push(header);
                continue;
            }
            let page_count = header
                .page_count
                .min((end - header.address) / PAGE_BYTES)
                .min(self.pages_max);
            self.requests.push(header);
            self.outgoing_bytes.extend(self.layout.encode(&PageHeader {
                command: PE_PRESENT << PS_CMD_BITS | PS_IOV_ADD_F,
                page_count,
                ..header
            }));
            for page in 0..page_count {
                self.outgoing_bytes.extend(page_content(
                    header.namespace_pid,
                    header.address + page * PAGE_BYTES,
                ));
            }
        }
    }

    fn reply_with_changed_pages(&mut self, header: &PageHeader) {
        self.outgoing_bytes.extend(self.layout.encode(&PageHeader {
            command: CHANGED_PAGES,
            ..*header
        }));
        let addresses = (0..header.page_count).map(|page| header.address + page * PAGE_BYTES);
        let is_sent: Vec<(u64, bool)> = addresses
            .map(|address| {
                (
                    address,
                    pre_copy_state(header.namespace_pid, address) != PreCopyState::CurrentContent,
                )
            })
            .collect();
        for group in is_sent.chunks(8) {
            self.outgoing_bytes.push_back(
                group
                    .iter()
                    .rev()
                    .fold(0, |byte, (_, is_sent)| byte << 1 | u8::from(*is_sent)),
            );
        }
        for (address, _) in is_sent.iter().filter(|(_, is_sent)| *is_sent) {
            self.outgoing_bytes
                .extend(page_content(header.namespace_pid, *address));
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
    fn new(missing_memory: &BTreeMap<u64, BTreeMap<u64, u64>>, layout: HeaderLayout) -> Self {
        let page_addresses = |ranges: &BTreeMap<u64, u64>| {
            ranges
                .iter()
                .flat_map(|(start, end)| (*start..*end).step_by(PAGE_BYTES as usize))
                .collect()
        };
        let unrequested_pages = missing_memory
            .iter()
            .map(|(process, ranges)| (*process, page_addresses(ranges)))
            .collect();
        Self {
            layout,
            unrequested_pages,
            open_requests: VecDeque::new(),
            received_bytes: Vec::new(),
            background_pages_max: 4,
            received_pages: BTreeSet::new(),
        }
    }

    fn start_request(&mut self, namespace_pid: u64, address: u64, page_count: u64) -> Vec<u8> {
        let header = PageHeader {
            command: PS_IOV_GET,
            page_count,
            address,
            namespace_pid,
        };
        let unrequested_pages = self
            .unrequested_pages
            .get_mut(&namespace_pid)
            .expect("it misses something");
        for page in 0..page_count {
            unrequested_pages.remove(&(address + page * PAGE_BYTES));
        }
        self.open_requests.push_back(header);
        self.layout.encode(&header)
    }

    /// Returns the next request of the background transfer.
    fn background_request(&mut self, namespace_pid: u64) -> Option<Vec<u8>> {
        let is_open = self
            .open_requests
            .iter()
            .any(|head| head.namespace_pid == namespace_pid && head.page_count > 1);
        let unrequested_pages = &self.unrequested_pages[&namespace_pid];
        let first_page = *unrequested_pages.first().filter(|_| !is_open)?;
        let adjacent_pages = (0..self.background_pages_max)
            .take_while(|page| unrequested_pages.contains(&(first_page + page * PAGE_BYTES)));
        let page_count = adjacent_pages.count() as u64;
        self.background_pages_max = (self.background_pages_max + 4).min(200);
        Some(self.start_request(namespace_pid, first_page, page_count))
    }

    /// Returns a request for a page fault at a page that was not requested yet.
    fn fault_request(&mut self, namespace_pid: u64, index: usize) -> Option<Vec<u8>> {
        let unrequested_pages = &self.unrequested_pages[&namespace_pid];
        let address = *unrequested_pages
            .iter()
            .nth(index % unrequested_pages.len().max(1))?;
        self.background_pages_max = 4;
        Some(self.start_request(namespace_pid, address, 1))
    }

    fn receive(&mut self, bytes: &[u8]) {
        self.received_bytes.extend(bytes);
        while self.received_bytes.len() >= self.layout.bytes() && !self.open_requests.is_empty() {
            let header = self.layout.decode(&self.received_bytes);
            let length = self.layout.bytes() + (header.page_count * PAGE_BYTES) as usize;
            if self.received_bytes.len() < length {
                return;
            }
            let request = self.open_requests.pop_front().expect("it has asked");
            assert_eq!(header.command, PE_PRESENT << PS_CMD_BITS | PS_IOV_ADD_F);
            assert_eq!(
                (header.namespace_pid, header.address),
                (request.namespace_pid, request.address)
            );
            assert!(
                (1..=request.page_count).contains(&header.page_count),
                "{header:?} for {request:?}"
            );
            let body: Vec<u8> = self
                .received_bytes
                .drain(..length)
                .skip(self.layout.bytes())
                .collect();
            for (page, bytes) in body.chunks(PAGE_BYTES as usize).enumerate() {
                let address = header.address + page as u64 * PAGE_BYTES;
                assert_eq!(bytes, page_content(header.namespace_pid, address));
                assert!(
                    self.received_pages.insert((header.namespace_pid, address)),
                    "twice"
                );
            }
            for page in header.page_count..request.page_count {
                self.unrequested_pages
                    .get_mut(&header.namespace_pid)
                    .expect("known")
                    .insert(request.address + page * PAGE_BYTES);
            }
        }
    }
}

/// A simulated socket of CRIU that accepts at most `free_bytes` further bytes.
struct Socket {
    bytes: Vec<u8>,
    free_bytes: usize,
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let accepted_bytes = bytes.len().min(self.free_bytes);
        self.free_bytes -= accepted_bytes;
        self.bytes.extend(&bytes[..accepted_bytes]);
        if accepted_bytes == 0 {
            Err(io::ErrorKind::WouldBlock.into())
        } else {
            Ok(accepted_bytes)
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
        missing_memory: &BTreeMap<u64, BTreeMap<u64, u64>>,
        layout: HeaderLayout,
        pages_max: u64,
    ) -> Self {
        Self::with_received_pages(
            missing_memory,
            ReceivedPages::with_page_size(PAGE_BYTES),
            layout,
            pages_max,
        )
    }

    fn with_received_pages(
        missing_memory: &BTreeMap<u64, BTreeMap<u64, u64>>,
        received_pages: ReceivedPages,
        layout: HeaderLayout,
        pages_max: u64,
    ) -> Self {
        let prefetcher = Prefetcher::new(
            MissingMemory(missing_memory.clone()),
            received_pages,
            PAGE_BYTES,
            Instant::now(),
        );
        let (requests, outgoing_bytes) = (Vec::new(), VecDeque::new());
        let source = SimulatedSource {
            missing_memory: missing_memory.clone(),
            layout,
            pages_max,
            requests,
            outgoing_bytes,
        };
        Self {
            prefetcher,
            engine: SimulatedEngine::new(missing_memory, layout),
            source,
            engine_buffer_bytes: usize::MAX,
        }
    }

    fn send_from_engine(&mut self, request_bytes: Option<Vec<u8>>) {
        if let Some(request_bytes) = request_bytes {
            self.prefetcher.receive_from_engine(&request_bytes);
            self.exchange_data();
        }
    }

    /// Delivers at most `bytes` bytes from the source to the proxy, and advances the clock.
    fn deliver_from_source(&mut self, bytes: usize) {
        self.prefetcher
            .set_now(self.prefetcher.now + Duration::from_micros(bytes as u64 % 20_000));
        self.exchange_data();
        let mut remaining_bytes = bytes.min(self.source.outgoing_bytes.len());
        while remaining_bytes > 0 {
            let buffer = self.prefetcher.receive_buffer();
            let read_bytes = buffer.len().min(remaining_bytes);
            buffer[..read_bytes].fill_with(|| {
                self.source
                    .outgoing_bytes
                    .pop_front()
                    .expect("it was counted")
            });
            self.prefetcher
                .receive_from_source(read_bytes)
                .expect("it says what it was asked");
            remaining_bytes -= read_bytes;
            self.exchange_data();
        }
    }

    fn exchange_data(&mut self) {
        loop {
            let mut socket = Socket {
                bytes: Vec::new(),
                free_bytes: self.engine_buffer_bytes,
            };
            self.prefetcher
                .write_replies(&mut socket)
                .expect("it is memory");
            self.engine.receive(&socket.bytes);
            self.source
                .receive_requests(&std::mem::take(self.prefetcher.bytes_for_source()));
            if !self.prefetcher.is_blocked() {
                break;
            }
        }
        let requested_headers = self
            .engine
            .open_requests
            .iter()
            .filter(|head| head.page_count > 1);
        let extra_pages_max: u64 = requested_headers.map(|head| head.page_count).sum();
        assert!(self.prefetcher.chunks.len() as u64 <= CHUNKS_MAX as u64 + extra_pages_max);
        let chunks_in_flight = self
            .prefetcher
            .source_requests
            .iter()
            .filter(|request| request.is_chunk)
            .count();
        assert!(chunks_in_flight <= IN_FLIGHT_CHUNKS_MAX + 1);
    }

    /// Runs until CRIU has all memory and has sent PS_IOV_CLOSE.
    fn run_to_end(&mut self) {
        let processes: Vec<u64> = self.engine.unrequested_pages.keys().copied().collect();
        while self
            .engine
            .unrequested_pages
            .values()
            .any(|unrequested_pages| !unrequested_pages.is_empty())
            || !self.engine.open_requests.is_empty()
        {
            for process in &processes {
                let request_bytes = self.engine.background_request(*process);
                self.send_from_engine(request_bytes);
            }
            self.deliver_from_source(usize::MAX);
        }
        let close_request = PageHeader {
            command: PS_IOV_CLOSE,
            page_count: 0,
            address: 0,
            namespace_pid: 0,
        };
        assert!(!self.prefetcher.engine_has_all_memory());
        self.send_from_engine(Some(self.source.layout.encode(&close_request)));
        assert!(self.prefetcher.engine_has_all_memory() && !self.prefetcher.is_finished());
        assert_eq!(self.prefetcher.missing_close_reply(), CLOSE_REPLY);
        self.deliver_from_source(usize::MAX);
        assert_eq!(self.engine.received_bytes, CLOSE_REPLY);
        assert!(self.prefetcher.is_finished());
    }
}

fn missing_ranges(lengths: &[(u64, u64)], start_address: u64) -> BTreeMap<u64, u64> {
    let mut address = start_address;
    let to_range = |(gap, pages): &(u64, u64)| {
        let start = address + gap * PAGE_BYTES;
        address = start + pages * PAGE_BYTES;
        (start, address)
    };
    lengths.iter().map(to_range).collect()
}

#[derive(Clone, Debug)]
enum SimulationStep {
    Background(u64),
    PageFault(u64, usize),
    DeliverFromSource(usize),
}

fn any_step() -> impl Strategy<Value = SimulationStep> {
    prop_oneof![
        3 => (1..=3u64).prop_map(SimulationStep::Background),
        2 => (1..=3u64, any::<usize>()).prop_map(|(namespace_pid, index)| SimulationStep::PageFault(namespace_pid, index)),
        4 => (1..5000usize).prop_map(SimulationStep::DeliverFromSource),
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
        engine_buffer_bytes in prop_oneof![2 => Just(usize::MAX), 1 => 1..3000usize],
        with_pre_copy in any::<bool>(),
    ) {
        let missing_memory = (1..).zip(lengths.iter().map(|lengths| missing_ranges(lengths, 7 * PAGE_BYTES))).collect();
        let layout = if long_layout { HeaderLayout::Long } else { HeaderLayout::Short };
        let pre_copied = if with_pre_copy { pre_copied_pages(&missing_memory) } else { ReceivedPages::with_page_size(PAGE_BYTES) };
        let mut simulation = ProxySimulation::with_received_pages(&missing_memory, pre_copied, layout, pages_max);
        simulation.engine_buffer_bytes = engine_buffer_bytes;
        for step in steps {
            match step {
                SimulationStep::Background(process) => {
                    let request_bytes = simulation.engine.background_request(process);
                    simulation.send_from_engine(request_bytes);
                }
                SimulationStep::PageFault(process, index) => {
                    let request_bytes = simulation.engine.fault_request(process, index);
                    simulation.send_from_engine(request_bytes);
                }
                SimulationStep::DeliverFromSource(bytes) => simulation.deliver_from_source(bytes),
            }
        }
        simulation.run_to_end();
        let count_pages = |ranges: &BTreeMap<u64, u64>| ranges.iter().map(|(start, end)| (end - start) / PAGE_BYTES).sum::<u64>();
        prop_assert_eq!(simulation.engine.received_pages.len() as u64, missing_memory.values().map(count_pages).sum::<u64>());
    }
}

/// Background requests are answered from stored chunks, even while page faults interrupt them.
#[test]
fn background_requests_are_answered_at_once() {
    let missing_memory = BTreeMap::from([(1, missing_ranges(&[(0, 4000)], 64))]);
    let mut simulation = ProxySimulation::new(&missing_memory, HeaderLayout::Long, u64::MAX);
    let request_bytes = simulation.engine.background_request(1);
    simulation.send_from_engine(request_bytes);
    simulation.deliver_from_source(usize::MAX);
    let mut wait_count = 0;
    for round in 0.. {
        if round % 3 == 0 {
            // A page fault in memory beyond the chunks in flight.
            let request_bytes = simulation.engine.fault_request(1, 1000);
            simulation.send_from_engine(request_bytes);
            simulation.deliver_from_source(usize::MAX);
        }
        let Some(request_bytes) = simulation.engine.background_request(1) else {
            break;
        };
        simulation.send_from_engine(Some(request_bytes));
        wait_count += usize::from(!simulation.engine.open_requests.is_empty());
        simulation.deliver_from_source(usize::MAX);
        if simulation.engine.unrequested_pages[&1].len() < 1500 {
            break;
        }
    }
    assert_eq!(wait_count, 0);
}

/// Long background requests of many processes are requested from the source only once.
#[test]
fn long_background_requests_are_fetched_once() {
    let missing_memory = (1..=20)
        .map(|process| (process, missing_ranges(&[(0, 3000)], 64)))
        .collect();
    let mut simulation = ProxySimulation::new(&missing_memory, HeaderLayout::Long, u64::MAX);
    simulation.engine.background_pages_max = 1500;
    simulation.run_to_end();
    let requested_pages: u64 = simulation
        .source
        .requests
        .iter()
        .map(|head| head.page_count)
        .sum();
    assert_eq!(requested_pages, 20 * 3000);
}

/// Before the background transfer has started, only pages of page faults are requested.
#[test]
fn no_prefetch_before_background_transfer() {
    let missing_memory = BTreeMap::from([(1, missing_ranges(&[(0, 4000)], 64))]);
    let mut simulation = ProxySimulation::new(&missing_memory, HeaderLayout::Long, u64::MAX);
    for _ in 0..5 {
        let request_bytes = simulation.engine.fault_request(1, 1000);
        simulation.send_from_engine(request_bytes);
        simulation.deliver_from_source(usize::MAX);
    }
    assert!(
        simulation
            .source
            .requests
            .iter()
            .all(|head| head.page_count == 1),
        "{:?}",
        simulation.source.requests
    );
}

/// Messages that are not requests for missing pages are forwarded unchanged in both directions.
#[test]
fn unknown_messages_pass_unchanged() {
    for message in [
        &b"anything"[..],
        &[7; 100],
        &HeaderLayout::Long.encode(&PageHeader {
            command: PS_IOV_GET,
            page_count: 1,
            address: 0,
            namespace_pid: 9,
        }),
    ] {
        let missing_memory = BTreeMap::from([(1, missing_ranges(&[(0, 40)], 64))]);
        let mut prefetcher = Prefetcher::new(
            MissingMemory(missing_memory),
            ReceivedPages::with_page_size(PAGE_BYTES),
            PAGE_BYTES,
            Instant::now(),
        );
        for _ in 0..2 {
            prefetcher.receive_from_engine(message);
            assert_eq!(std::mem::take(prefetcher.bytes_for_source()), message);
            prefetcher.receive_buffer()[..3].copy_from_slice(b"yes");
            prefetcher.receive_from_source(3).expect("it passes");
            let mut engine_input = Vec::new();
            prefetcher
                .write_replies(&mut engine_input)
                .expect("it is memory");
            assert_eq!(engine_input, b"yes");
        }
        assert!(prefetcher.engine_is_done() && !prefetcher.engine_has_all_memory());
    }
}

/// A reply that does not match the request is an error.
#[test]
fn unexpected_reply_is_an_error() {
    let missing_memory = BTreeMap::from([(1, missing_ranges(&[(0, 40)], 64))]);
    let request = PageHeader {
        command: PS_IOV_GET,
        page_count: 4,
        address: 64,
        namespace_pid: 1,
    };
    let valid_reply = PageHeader {
        command: PE_PRESENT << PS_CMD_BITS | PS_IOV_ADD_F,
        page_count: 40,
        ..request
    };
    for invalid_reply in [
        PageHeader {
            command: PS_IOV_ADD_F,
            ..valid_reply
        },
        PageHeader {
            address: 80,
            ..valid_reply
        },
        PageHeader {
            namespace_pid: 2,
            ..valid_reply
        },
        PageHeader {
            page_count: 41,
            ..valid_reply
        },
        PageHeader {
            page_count: 0,
            ..valid_reply
        },
    ] {
        let mut prefetcher = Prefetcher::new(
            MissingMemory(missing_memory.clone()),
            ReceivedPages::with_page_size(PAGE_BYTES),
            PAGE_BYTES,
            Instant::now(),
        );
        prefetcher.receive_from_engine(&HeaderLayout::Long.encode(&request));
        prefetcher
            .receive_buffer()
            .copy_from_slice(&HeaderLayout::Long.encode(&invalid_reply));
        prefetcher
            .receive_from_source(HeaderLayout::Long.bytes())
            .expect_err("it was not asked that");
    }
}

/// After a pre-copy only changed pages are transferred, and pre-copied memory is freed after use.
#[test]
fn only_changed_pages_are_transferred_again() {
    let missing_memory = BTreeMap::from([(1, missing_ranges(&[(0, 4000)], 0))]);
    let mut simulation = ProxySimulation::with_received_pages(
        &missing_memory,
        pre_copied_pages(&missing_memory),
        HeaderLayout::Long,
        u64::MAX,
    );
    let stored_pages = |simulation: &ProxySimulation| {
        simulation
            .source
            .requests
            .iter()
            .map(|head| (head.command, head.page_count))
            .collect::<Vec<_>>()
    };
    let request_bytes = simulation.engine.fault_request(1, 17);
    simulation.send_from_engine(request_bytes);
    simulation.deliver_from_source(usize::MAX);
    assert_eq!(
        stored_pages(&simulation),
        [(GET_CHANGED, 1)],
        "also of what the task needs"
    );
    simulation.run_to_end();
    let all_stored_pages = stored_pages(&simulation);
    assert!(
        all_stored_pages
            .iter()
            .all(|(command, _)| *command == GET_CHANGED),
        "{all_stored_pages:?}"
    );
    assert!(
        simulation.prefetcher.received_pages.stored_bytes() < BLOCK_PAGES * PAGE_BYTES,
        "nothing is kept that was used"
    );
    assert_eq!(simulation.engine.received_pages.len(), 4000);
}

/// A reply to [`GET_CHANGED`] that does not match the request is an error.
#[test]
fn unexpected_changed_reply_is_an_error() {
    let missing_memory = BTreeMap::from([(1, missing_ranges(&[(0, 40)], 0))]);
    let request = PageHeader {
        command: PS_IOV_GET,
        page_count: 4,
        address: 0,
        namespace_pid: 1,
    };
    let valid_reply = PageHeader {
        command: CHANGED_PAGES,
        ..request
    };
    let exchange = |pre_copied: ReceivedPages, reply: PageHeader| {
        let mut prefetcher = Prefetcher::new(
            MissingMemory(missing_memory.clone()),
            pre_copied,
            PAGE_BYTES,
            Instant::now(),
        );
        prefetcher.receive_from_engine(&HeaderLayout::Long.encode(&request));
        let source_request = HeaderLayout::Long.decode(prefetcher.bytes_for_source());
        prefetcher
            .receive_buffer()
            .copy_from_slice(&HeaderLayout::Long.encode(&PageHeader {
                page_count: reply.page_count.min(source_request.page_count),
                ..reply
            }));
        prefetcher
            .receive_from_source(HeaderLayout::Long.bytes())
            .map(|()| source_request)
    };
    let unlimited_reply = PageHeader {
        page_count: u64::MAX,
        ..valid_reply
    };
    assert_eq!(
        exchange(pre_copied_pages(&missing_memory), unlimited_reply)
            .expect("that was asked")
            .command,
        GET_CHANGED
    );
    for invalid_reply in [
        PageHeader {
            page_count: 1,
            ..valid_reply
        },
        PageHeader {
            address: 16,
            ..unlimited_reply
        },
        PageHeader {
            command: PE_PRESENT << PS_CMD_BITS | PS_IOV_ADD_F,
            ..unlimited_reply
        },
    ] {
        exchange(pre_copied_pages(&missing_memory), invalid_reply)
            .expect_err("it was not asked that");
    }
    exchange(ReceivedPages::with_page_size(PAGE_BYTES), unlimited_reply)
        .expect_err("nothing came before");
}
