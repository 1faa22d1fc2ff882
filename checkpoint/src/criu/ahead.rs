//! A proxy between `criu lazy-pages` and the source, which requests memory before CRIU does.
//!
//! `criu lazy-pages` has two kinds of requests (PS_IOV_GET):
//!
//! - The background transfer goes through each process's missing memory from low to high addresses,
//!   one range at a time. After every page fault it starts again with short ranges.
//! - For a page fault of the task it requests a single page.
//!
//! Without the proxy each request takes a round trip between the hosts. The proxy splits the range
//! ahead of the background transfer into chunks and keeps some of them in flight, so that most of
//! CRIU's requests are answered at once.
//!
//! Rules:
//!
//! - Only pages that the images mark as lazy are requested. The source treats any other request as
//!   a protocol error.
//! - On either side, requests are answered in their order.
//! - If pages were pre-copied ([`super::precopy`]), the source is asked which of them have changed,
//!   and CRIU receives the merged pages.
//! - After the first message that is not a page request (in particular PS_IOV_CLOSE), all bytes
//!   pass unchanged in both directions.

mod carry;
mod coming;
mod missing;
mod patience;

pub(super) use carry::{Carrying, start};

use super::words::{
    ADD, CHANGED, CLOSE, CLOSE_ALL_THE_SAME, FLAGS_SHIFT, Form, GET, GET_CHANGED, Head, PARTING,
    PRESENT,
};
use crate::engine::ReceivedPages;
use coming::Coming;
use missing::{Missing, Process};
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, IoSlice, Write};
use std::time::{Duration, Instant};

/// Minimum and maximum size of a chunk. The size starts at the minimum and adapts to the round-trip
/// time.
const PIECE_PAGES_MIN: u64 = 16;
const PIECE_PAGES_MAX: u64 = 128;
/// Maximum number of chunks in flight, plus one if CRIU waits for it. Low, because the request for
/// a page fault queues after them.
const UNDER_WAY_MAX: usize = 2;
/// Bounds of the round-trip time for adapting the chunk size: above the first the size is halved,
/// below the second it is doubled.
const SLOW: Duration = Duration::from_millis(25);
const QUICK: Duration = Duration::from_millis(10);
/// Maximum number of chunks of one process that are in flight or in memory ahead of CRIU's
/// requests.
const AHEAD_MAX: usize = 4;
/// Maximum number of chunks of all processes, not counting those that CRIU has requested.
const PIECES_MAX: usize = 32;
/// Maximum number of unanswered requests of CRIU; further ones remain in the socket. Only as many
/// page faults can be pending as the task has threads.
const WANTED_MAX: usize = 65_536;
/// Maximum number of unused buffers that are kept for further chunks.
const SPARE_MAX: usize = 8;
/// Maximum number of bytes that are forwarded unchanged at once.
const PLAIN_BYTES: usize = 64 << 10;

/// Where the reply to a request of CRIU comes from.
#[derive(Debug)]
enum From {
    Pieces,
    /// The same request was sent to the source. Contains the pages once they have arrived.
    ItsOwn(Option<Vec<u8>>),
}

/// An unanswered request of CRIU.
#[derive(Debug)]
struct Wanted {
    head: Head,
    /// True for the background transfer, false for a page fault.
    in_turn: bool,
    from: From,
}

/// A range that the background transfer has requested and that is not yet requested from the
/// source.
#[derive(Clone, Copy, Debug)]
struct Turn {
    process: u64,
    address: u64,
    end: u64,
}

/// A request to the source that is not answered yet.
#[derive(Debug)]
struct Asked {
    process: u64,
    address: u64,
    pages: u64,
    is_piece: bool,
    at: Instant,
    /// The pre-copied pages of the range. Only changed pages are requested.
    known: Option<Vec<u8>>,
}

#[derive(Debug)]
struct Piece {
    end: u64,
    /// `None` while the chunk is in flight.
    bytes: Option<Vec<u8>>,
}

/// State of the proxy.
#[derive(Debug)]
struct Ahead {
    page: u64,
    now: Instant,
    processes: BTreeMap<u64, Process>,
    /// Pages that were pre-copied.
    store: ReceivedPages,
    /// Known from CRIU's first request.
    form: Option<Form>,
    /// What CRIU sends is forwarded unchanged.
    is_plain: bool,
    /// After CRIU has sent PS_IOV_CLOSE: number of bytes of the reply that the source has sent.
    parting: Option<usize>,
    heard: Vec<u8>,
    wanted: VecDeque<Wanted>,
    /// Number of bytes of the reply to the first pending request that CRIU has accepted.
    taken: usize,
    /// CRIU's socket buffer is full.
    is_blocked: bool,
    turns: VecDeque<Turn>,
    asked: VecDeque<Asked>,
    /// Keyed by process and start address.
    pieces: BTreeMap<(u64, u64), Piece>,
    /// Size of the next chunk.
    piece_pages: u64,
    coming: Coming,
    spare: Vec<Vec<u8>>,
    to_other: Vec<u8>,
    plain: Vec<u8>,
    plain_room: Vec<u8>,
}

impl Ahead {
    fn new(missing: Missing, store: ReceivedPages, page: u64, now: Instant) -> Ahead {
        Ahead {
            page,
            now,
            processes: missing.into_processes(),
            store,
            form: None,
            is_plain: false,
            parting: None,
            heard: Vec::new(),
            wanted: VecDeque::new(),
            taken: 0,
            is_blocked: false,
            turns: VecDeque::new(),
            asked: VecDeque::new(),
            pieces: BTreeMap::new(),
            piece_pages: PIECE_PAGES_MIN,
            coming: Coming::default(),
            spare: Vec::new(),
            to_other: Vec::new(),
            plain: Vec::new(),
            plain_room: Vec::new(),
        }
    }

    /// Sets the current time. Must be called before any other step.
    fn tell_time(&mut self, now: Instant) {
        self.now = now;
    }

    /// True if CRIU has sent something other than a page request, as it does before it exits
    /// successfully, or if no memory is missing.
    fn has_taken_leave(&self) -> bool {
        self.is_plain || self.processes.is_empty()
    }

    /// True if CRIU has reported that it has all memory (PS_IOV_CLOSE).
    fn has_all(&self) -> bool {
        self.parting.is_some()
    }

    /// Returns the part of the reply to PS_IOV_CLOSE that has not arrived from the source.
    fn rest_of_parting(&self) -> &'static [u8] {
        &PARTING[self.parting.unwrap_or(0).min(PARTING.len())..]
    }

    /// True if CRIU has received the whole reply to PS_IOV_CLOSE, so that the proxy may end.
    fn has_parted(&self) -> bool {
        self.has_all() && self.rest_of_parting().is_empty() && self.plain.is_empty()
    }

    /// True if more requests of CRIU may be read.
    fn takes_questions(&self) -> bool {
        self.wanted.len() < WANTED_MAX
    }

    /// True if more data of the source may be read.
    fn takes_answers(&self) -> bool {
        self.plain.len() < PLAIN_BYTES
    }

    /// True if there is more data for CRIU than it accepts.
    fn is_blocked(&self) -> bool {
        self.is_blocked
    }

    /// Returns the bytes to be sent to the source. The caller removes those that were sent.
    fn questions(&mut self) -> &mut Vec<u8> {
        &mut self.to_other
    }

    // ---- CRIU's side

    fn engine_says(&mut self, bytes: &[u8]) {
        self.heard.extend(bytes);
        if !self.is_plain && self.form.is_none() {
            self.form = self.recognise();
            self.is_plain = self.form.is_none();
        }
        while let (false, Some(form)) = (self.is_plain, self.form) {
            if self.heard.len() < form.bytes() {
                break;
            }
            let head = form.read(&self.heard);
            self.is_plain = head.command != GET || head.pages == 0;
            if !self.is_plain {
                self.heard.drain(..form.bytes());
                self.question(head);
            }
        }
        if self.is_plain {
            if self.wanted.is_empty() && is_leave(&self.heard) {
                self.parting.get_or_insert(0);
            }
            // Replies must follow the order of the requests, so all pending ranges are requested
            // first.
            while self.ask_in_turn() {}
            self.to_other.append(&mut self.heard);
        }
        self.fetch_ahead();
    }

    /// Detects the header layout by a request for a missing page.
    fn recognise(&self) -> Option<Form> {
        let misses = |process, address| {
            self.processes
                .get(&process)
                .is_some_and(|of| of.misses(address).is_some())
        };
        Form::of_question(&self.heard, misses)
    }

    fn question(&mut self, head: Head) {
        let end = self.end_of(&head);
        let page = self.page;
        let mut in_turn = false;
        if let Some(process) = self.processes.get_mut(&head.process) {
            in_turn =
                process.turn(head.address, end, page) && process.misses_all(head.address, end);
        }
        if in_turn {
            self.turns.push_back(Turn {
                process: head.process,
                address: head.address,
                end,
            });
        }
        let from = match in_turn || self.covered(head.process, head.address, end) {
            true => From::Pieces,
            false => self.ask_for_itself(&head),
        };
        self.wanted.push_back(Wanted {
            head,
            in_turn,
            from,
        });
    }

    fn end_of(&self, head: &Head) -> u64 {
        head.address
            .saturating_add(head.pages.saturating_mul(self.page))
    }

    /// True if the whole range is in chunks that are in memory or in flight.
    fn covered(&self, process: u64, address: u64, end: u64) -> bool {
        self.uncovered(process, address, end).is_none()
    }

    /// Returns the first address of the range that is in no chunk.
    fn uncovered(&self, process: u64, mut address: u64, end: u64) -> Option<u64> {
        while address < end {
            match self.piece_at(process, address) {
                Some((_, piece)) => address = piece.end,
                None => return Some(address),
            }
        }
        None
    }

    fn piece_at(&self, process: u64, address: u64) -> Option<(u64, &Piece)> {
        let (&(of, start), piece) = self.pieces.range(..=(process, address)).next_back()?;
        (of == process && address < piece.end).then_some((start, piece))
    }

    /// Writes the replies that are available, as far as CRIU accepts them.
    fn answer(&mut self, out: &mut impl Write) -> io::Result<()> {
        self.is_blocked = false;
        while self.answer_first(out)? {}
        self.fetch_ahead();
        if self.wanted.is_empty() {
            self.is_blocked = !write_from(out, &mut self.plain)?;
        }
        Ok(())
    }

    /// Answers the first pending request. True if more may be answered.
    fn answer_first(&mut self, out: &mut impl Write) -> io::Result<bool> {
        let (Some(form), Some(first)) = (self.form, self.wanted.front()) else {
            return Ok(false);
        };
        let (head, in_turn) = (first.head, first.in_turn);
        let mut found: Vec<&[u8]> = Vec::new();
        match &first.from {
            From::ItsOwn(None) => return Ok(false),
            From::ItsOwn(Some(bytes)) => found.push(bytes),
            From::Pieces => {
                let end = self.end_of(&head);
                let mut at = head.address;
                while at < end {
                    let Some((start, piece)) = self.piece_at(head.process, at) else {
                        self.ask_after_all(&head, in_turn, at);
                        return Ok(false);
                    };
                    let Some(bytes) = &piece.bytes else {
                        return Ok(false);
                    };
                    let until = end.min(piece.end);
                    found.push(&bytes[(at - start) as usize..(until - start) as usize]);
                    at = until;
                }
            }
        }
        let bytes: usize = found.iter().map(|part| part.len()).sum();
        let answer = Head {
            command: PRESENT << FLAGS_SHIFT | ADD,
            pages: bytes as u64 / self.page,
            ..head
        };
        let answer = form.write(&answer);
        found.insert(0, &answer);
        let whole = answer.len() + bytes;
        self.taken += write_parts(out, &found, self.taken)?;
        if self.taken < whole {
            self.is_blocked = true;
            return Ok(false);
        }
        self.taken = 0;
        let Some(done) = self.wanted.pop_front() else {
            return Ok(false);
        };
        self.store
            .mark_delivered(head.process, head.address, bytes as u64 / self.page);
        if let From::ItsOwn(Some(bytes)) = done.from {
            self.put_by(bytes);
        }
        if done.in_turn {
            self.forget_before(head.process, head.address + bytes as u64);
        }
        Ok(true)
    }

    /// Requests what the first pending request of CRIU lacks at address `at`: the page was not
    /// requested from the source yet, or the source's reply for its chunk was shorter than
    /// requested.
    fn ask_after_all(&mut self, head: &Head, in_turn: bool, at: u64) {
        if !in_turn {
            let from = self.ask_for_itself(head);
            self.wanted.front_mut().expect("it was looked at").from = from;
            return;
        }
        let (process, end) = (head.process, self.end_of(head));
        let comes = |turn: &Turn| turn.process == process && (turn.address..turn.end).contains(&at);
        if !self.turns.iter().any(comes) {
            self.turns.push_front(Turn {
                process,
                address: at,
                end,
            });
        }
    }

    /// Drops the chunks before this address, which the background transfer has passed.
    fn forget_before(&mut self, process: u64, address: u64) {
        let behind = self.pieces.range((process, 0)..(process, address));
        let behind = behind.filter(|(_, piece)| piece.bytes.is_some() && piece.end <= address);
        let behind: Vec<(u64, u64)> = behind.map(|(key, _)| *key).collect();
        for key in behind {
            if let Some(bytes) = self.pieces.remove(&key).and_then(|piece| piece.bytes) {
                self.put_by(bytes);
            }
        }
    }

    fn put_by(&mut self, bytes: Vec<u8>) {
        if self.spare.len() < SPARE_MAX && bytes.capacity() as u64 <= PIECE_PAGES_MAX * self.page {
            self.spare.push(bytes);
        }
    }

    // ---- The source's side

    fn ask(&mut self, process: u64, address: u64, pages: u64, is_piece: bool) {
        let Some(form) = self.form else { return };
        let known = self.store.get(process, address, pages);
        let command = if known.is_some() { GET_CHANGED } else { GET };
        self.to_other.extend(form.write(&Head {
            command,
            pages,
            address,
            process,
        }));
        self.asked.push_back(Asked {
            process,
            address,
            pages,
            is_piece,
            at: self.now,
            known,
        });
    }

    fn ask_for_itself(&mut self, head: &Head) -> From {
        let &Head {
            process,
            address,
            pages,
            ..
        } = head;
        self.ask(process, address, pages, false);
        From::ItsOwn(None)
    }

    /// Requests the next chunk of the pending background ranges. False if there is none.
    fn ask_in_turn(&mut self) -> bool {
        while let Some(Turn {
            process,
            address,
            end,
        }) = self.turns.pop_front()
        {
            let Some(at) = self.uncovered(process, address, end) else {
                continue;
            };
            let Some(until) = self.ask_piece(process, at) else {
                continue;
            };
            self.turns.push_front(Turn {
                process,
                address: until,
                end,
            });
            return true;
        }
        false
    }

    /// Requests a chunk that begins at an address that is in no chunk. Returns the chunk's end.
    fn ask_piece(&mut self, process: u64, address: u64) -> Option<u64> {
        let (_, end) = self.processes.get(&process)?.misses(address)?;
        let end = end.min(address + self.piece_pages * self.page);
        let next = self
            .pieces
            .range((process, address)..)
            .next()
            .filter(|((of, _), _)| *of == process);
        let end = next.map_or(end, |((_, start), _)| end.min(*start));
        self.pieces
            .insert((process, address), Piece { end, bytes: None });
        self.ask(process, address, (end - address) / self.page, true);
        Some(end)
    }

    /// Keeps chunks in flight, those that CRIU waits for first.
    fn fetch_ahead(&mut self) {
        while self.asked.len() <= UNDER_WAY_MAX && self.ask_in_turn() {}
        if self.is_plain {
            return;
        }
        let begun: Vec<(u64, u64)> = self
            .processes
            .iter()
            .filter_map(|(number, process)| Some((*number, process.next()?)))
            .collect();
        for (process, mut address) in begun {
            for _ in 0..AHEAD_MAX {
                let known = self.piece_at(process, address).map(|(_, piece)| piece.end);
                if known.is_none()
                    && (self.asked.len() >= UNDER_WAY_MAX || self.pieces.len() >= PIECES_MAX)
                {
                    return;
                }
                let Some(end) = known.or_else(|| self.ask_piece(process, address)) else {
                    break;
                };
                match self
                    .processes
                    .get(&process)
                    .and_then(|p| p.missing_from(end))
                {
                    Some(next) => address = next,
                    None => break,
                }
            }
        }
    }

    /// True if data from the source is forwarded unchanged.
    fn comes_plain(&self) -> bool {
        self.asked.is_empty() && (self.is_plain || self.form.is_none())
    }

    /// Returns the buffer for the next bytes from the source.
    fn room(&mut self) -> &mut [u8] {
        if self.comes_plain() {
            self.plain_room.resize(PLAIN_BYTES, 0);
            return &mut self.plain_room;
        }
        self.coming.room(self.form.map_or(0, Form::bytes))
    }

    /// Processes bytes that were read into this buffer.
    ///
    /// # Errors
    /// The source has sent something other than the expected reply.
    fn came(&mut self, bytes: usize) -> Result<(), String> {
        if self.comes_plain() {
            self.plain.extend(&self.plain_room[..bytes]);
            self.parting = self.parting.map(|came| came + bytes);
            return Ok(());
        }
        let Some(form) = self.form else { return Ok(()) };
        self.coming.came(bytes);
        if let Some(head) = self.coming.head(form) {
            self.head_came(&head)?;
        }
        self.coming.look_at_marks(self.page)?;
        if let Some(body) = self.coming.body() {
            self.body_came(body);
        }
        self.fetch_ahead();
        Ok(())
    }

    fn head_came(&mut self, head: &Head) -> Result<(), String> {
        let unfit = |asked| format!("asked for {asked} the engine at the source says {head:?}");
        let asked = self
            .asked
            .front_mut()
            .ok_or_else(|| unfit("nothing".to_string()))?;
        let &mut Asked {
            process,
            address,
            pages,
            ..
        } = asked;
        let is_of_it = (head.process, head.address) == (process, address);
        match (&mut asked.known, head.command, head.pages) {
            (Some(known), CHANGED, answered) if is_of_it && answered == pages => {
                self.coming.expect_marks(std::mem::take(known), pages);
            }
            (None, command, answered)
                if is_of_it
                    && command == PRESENT << FLAGS_SHIFT | ADD
                    && (1..=pages).contains(&answered) =>
            {
                let mut body = self.spare.pop().unwrap_or_default();
                body.resize((answered * self.page) as usize, 0);
                self.coming.expect_all(body);
            }
            _ => {
                return Err(unfit(format!(
                    "{pages} pages at {address:#x} of process {process}"
                )));
            }
        }
        Ok(())
    }

    fn body_came(&mut self, body: Vec<u8>) {
        let Some(asked) = self.asked.pop_front() else {
            return;
        };
        if asked.is_piece {
            self.piece_pages = match self.now.saturating_duration_since(asked.at) {
                took if took > SLOW => (self.piece_pages / 2).max(PIECE_PAGES_MIN),
                took if took < QUICK => (self.piece_pages * 2).min(PIECE_PAGES_MAX),
                _ => self.piece_pages,
            };
            if let Some(piece) = self.pieces.get_mut(&(asked.process, asked.address)) {
                piece.end = asked.address + body.len() as u64;
                piece.bytes = Some(body);
            }
        } else {
            let is_its = |wanted: &&mut Wanted| {
                let Head {
                    process,
                    address,
                    pages,
                    ..
                } = wanted.head;
                let is_same =
                    (process, address, pages) == (asked.process, asked.address, asked.pages);
                is_same && matches!(wanted.from, From::ItsOwn(None))
            };
            if let Some(waits) = self.wanted.iter_mut().find(is_its) {
                waits.from = From::ItsOwn(Some(body));
            }
        }
    }
}

/// True if this is the message that CRIU sends before it exits successfully.
fn is_leave(words: &[u8]) -> bool {
    let command = words
        .first_chunk()
        .map(|command| u32::from_ne_bytes(*command));
    matches!(command, Some(CLOSE | CLOSE_ALL_THE_SAME))
}

/// Writes the concatenation of `parts` from byte `skipped` on. Returns the number of bytes that
/// were accepted.
fn write_parts(out: &mut impl Write, parts: &[&[u8]], skipped: usize) -> io::Result<usize> {
    let mut slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
    let mut left = &mut slices[..];
    IoSlice::advance_slices(&mut left, skipped);
    let mut taken = 0;
    while !left.is_empty() {
        match out.write_vectored(left) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => {
                taken += written;
                IoSlice::advance_slices(&mut left, written);
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
            Err(e) => return Err(e),
        }
    }
    Ok(taken)
}

/// Writes these bytes and removes those that were accepted. True if nothing remains.
fn write_from(out: &mut impl Write, bytes: &mut Vec<u8>) -> io::Result<bool> {
    let taken = write_parts(out, &[bytes], 0)?;
    bytes.drain(..taken);
    Ok(bytes.is_empty())
}

#[cfg(test)]
mod tests;
