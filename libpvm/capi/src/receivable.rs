//! The messages that can be received, in the order in which they were taken in.
//!
//! A receive call takes the oldest message that matches sender, tag and context. Up to
//! [`LINEAR_SEARCH_MAX`] messages are examined one by one. More messages are entered into an index,
//! so that a search costs the same for any number of messages. A message that is received soon
//! after it was taken in is never entered.
//!
//! The index contains four lists for the header of each message: all messages of its context, those
//! of its sender, those with its tag, and those of its sender with its tag. The lists are linked
//! through the entries of the messages, so their memory is proportional to the number of messages.

use rustc_hash::FxHashMap;

/// Maximum number of messages at the end of the list that a search examines one by one. When there
/// are more, the search enters them into the index first.
const LINEAR_SEARCH_MAX: usize = 16;
/// Number of lists of the index that contain each message.
const LISTS_PER_MESSAGE: usize = 4;
/// Stands for no entry in a link.
const NO_ENTRY: u32 = u32::MAX;

/// The part of a message header that a receive call selects by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) src: i32,
    pub(crate) tag: i32,
    pub(crate) ctx: i32,
}

/// The messages that a receive call accepts; −1 matches any value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) src: i32,
    pub(crate) tag: i32,
    pub(crate) ctx: i32,
}

impl Request {
    /// The library's own matching rule.
    #[inline]
    pub(crate) fn matches(&self, header: Header) -> bool {
        (self.src == -1 || self.src == header.src)
            && (self.tag == -1 || self.tag == header.tag)
            && (self.ctx == -1 || self.ctx == header.ctx)
    }

    /// Returns the list of the index that contains the matching messages; `None` if there is no
    /// such list, because the request accepts any context.
    fn index_key(&self) -> Option<IndexKey> {
        (self.ctx != -1).then_some(IndexKey {
            src: (self.src != -1).then_some(self.src),
            tag: (self.tag != -1).then_some(self.tag),
            ctx: self.ctx,
        })
    }
}

/// Name of a list of the index. Sender and tag are `None` in lists that contain any.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct IndexKey {
    src: Option<i32>,
    tag: Option<i32>,
    ctx: i32,
}

impl IndexKey {
    /// Returns the names of the lists that contain a message with this header.
    fn all_of(header: Header) -> [Self; LISTS_PER_MESSAGE] {
        let Header { src, tag, ctx } = header;
        let key = |src, tag| Self { src, tag, ctx };
        [
            key(None, None),
            key(Some(src), None),
            key(None, Some(tag)),
            key(Some(src), Some(tag)),
        ]
    }
}

/// Place of a message in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ListEntry(u32);

/// The first and the last entry of a linked list, or the neighbours of an entry.
#[derive(Clone, Copy, Debug)]
struct Links {
    /// First entry of a list, or next entry.
    forward: u32,
    /// Last entry of a list, or previous entry.
    backward: u32,
}

impl Default for Links {
    fn default() -> Self {
        Self {
            forward: NO_ENTRY,
            backward: NO_ENTRY,
        }
    }
}

#[derive(Debug)]
struct Entry {
    mid: i32,
    /// Number of the message; messages are numbered in the order of the list.
    seq: u64,
    neighbours: Links,
    /// Header of the message when it was appended.
    header: Header,
    is_indexed: bool,
    index_neighbours: [Links; LISTS_PER_MESSAGE],
}

/// The messages that can be received, in the order in which they were taken in.
#[derive(Debug, Default)]
pub(crate) struct ReceivableList {
    /// Entries of messages, and free entries.
    entries: Vec<Entry>,
    free_entries: Vec<u32>,
    ends: Links,
    /// Number of messages behind the last message in the index.
    unindexed_count: usize,
    /// The oldest of these messages.
    first_unindexed: Option<u32>,
    index: FxHashMap<IndexKey, Links>,
    /// True if the header of a message may change while the message is in the list. Searches
    /// examine all messages until the list is empty.
    has_changing_header: bool,
    next_seq: u64,
    /// The last request that no message matched, and the number of the next message at that time.
    /// A program that waits for an answer searches with the same request again and again.
    last_unmatched: Option<(Request, u64)>,
}

impl ReceivableList {
    /// True if no message can be received.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.ends.forward == NO_ENTRY
    }

    /// Number of the next message. All messages that were ever in the list have lower numbers.
    pub(crate) fn next_seq(&self) -> u64 {
        self.next_seq
    }

    /// Iterates over the buffer numbers of the messages from the number `seq` on, oldest first. The
    /// cost is proportional to the number of these messages.
    pub(crate) fn mids_since(&self, seq: u64) -> impl Iterator<Item = i32> {
        let mut start = NO_ENTRY;
        if seq == 0 {
            start = self.ends.forward;
        } else {
            let mut candidate = self.ends.backward;
            while let Some(entry) = self.entry(candidate).filter(|entry| entry.seq >= seq) {
                start = candidate;
                candidate = entry.neighbours.backward;
            }
        }
        self.mids_from(start)
    }

    /// Returns the buffer number of the oldest message that `request` accepts. `header_of` returns
    /// the header that the message with a buffer number has now.
    #[inline]
    pub(crate) fn find(
        &mut self,
        request: &Request,
        header_of: impl Fn(i32) -> Option<Header>,
    ) -> Option<i32> {
        if self.has_changing_header {
            let is_match =
                |mid: &i32| header_of(*mid).is_some_and(|header| request.matches(header));
            return self.mids_since(0).find(is_match);
        }
        let unmatched = Some((*request, self.next_seq));
        if self.last_unmatched == unmatched {
            return None;
        }
        let found_mid = self.search(request);
        if found_mid.is_none() {
            self.last_unmatched = unmatched;
        }
        found_mid
    }

    /// Searches for the message by the headers that the messages had when they were appended.
    fn search(&mut self, request: &Request) -> Option<i32> {
        let Some(key) = request.index_key() else {
            return self.find_from(self.ends.forward, request);
        };
        if self.unindexed_count > LINEAR_SEARCH_MAX {
            self.extend_index();
        }
        // All messages in the index are older than the others.
        if !self.index.is_empty()
            && let Some(list) = self.index.get(&key)
        {
            return self.entry(list.forward).map(|entry| entry.mid);
        }
        self.find_from(self.first_unindexed.unwrap_or(NO_ENTRY), request)
    }

    /// Appends a message to the list and returns its place.
    pub(crate) fn push(&mut self, mid: i32, header: Header) -> ListEntry {
        let new_entry = Entry {
            mid,
            seq: self.next_seq,
            neighbours: Links {
                forward: NO_ENTRY,
                backward: self.ends.backward,
            },
            header,
            is_indexed: false,
            index_neighbours: [Links::default(); LISTS_PER_MESSAGE],
        };
        self.next_seq += 1;
        let number = match self.free_entries.pop() {
            Some(number) => {
                self.entries[number as usize] = new_entry;
                number
            }
            None => {
                self.entries.push(new_entry);
                // The number of buffers has a limit (`BUFFER_COUNT_MAX`) far below 2³².
                (self.entries.len() - 1) as u32
            }
        };
        match self.ends.backward {
            NO_ENTRY => self.ends.forward = number,
            last => self.entries[last as usize].neighbours.forward = number,
        }
        self.ends.backward = number;
        self.unindexed_count += 1;
        self.first_unindexed.get_or_insert(number);
        ListEntry(number)
    }

    /// Removes a message. `list_entry` is the result of the [`ReceivableList::push`] that appended
    /// it.
    pub(crate) fn remove(&mut self, list_entry: ListEntry) {
        let number = list_entry.0;
        let neighbours = self.entries[number as usize].neighbours;
        match neighbours.backward {
            NO_ENTRY => self.ends.forward = neighbours.forward,
            previous => self.entries[previous as usize].neighbours.forward = neighbours.forward,
        }
        match neighbours.forward {
            NO_ENTRY => self.ends.backward = neighbours.backward,
            next => self.entries[next as usize].neighbours.backward = neighbours.backward,
        }
        if self.entries[number as usize].is_indexed {
            self.remove_from_index(number);
        } else {
            self.unindexed_count -= 1;
            if self.first_unindexed == Some(number) {
                self.first_unindexed =
                    (neighbours.forward != NO_ENTRY).then_some(neighbours.forward);
            }
        }
        self.free_entries.push(number);
        if self.ends.forward == NO_ENTRY {
            self.has_changing_header = false;
        }
    }

    /// Prepares for a change of the header of a message in the list. From now on each search
    /// examines the headers of all messages, until the list is empty.
    pub(crate) fn expect_header_change(&mut self) {
        self.has_changing_header = true;
        self.index = FxHashMap::default();
        self.unindexed_count = 0;
        let mut number = self.ends.forward;
        self.first_unindexed = (number != NO_ENTRY).then_some(number);
        while number != NO_ENTRY {
            let entry = &mut self.entries[number as usize];
            entry.is_indexed = false;
            self.unindexed_count += 1;
            number = entry.neighbours.forward;
        }
    }

    fn entry(&self, number: u32) -> Option<&Entry> {
        (number != NO_ENTRY).then(|| &self.entries[number as usize])
    }

    fn mids_from(&self, start: u32) -> impl Iterator<Item = i32> {
        std::iter::successors(self.entry(start), |entry| {
            self.entry(entry.neighbours.forward)
        })
        .map(|entry| entry.mid)
    }

    /// Returns the first message from the entry `start` on that `request` accepts.
    #[inline]
    fn find_from(&self, start: u32, request: &Request) -> Option<i32> {
        let mut number = start;
        while let Some(entry) = self.entry(number) {
            if request.matches(entry.header) {
                return Some(entry.mid);
            }
            number = entry.neighbours.forward;
        }
        None
    }

    /// Enters all messages into the index.
    fn extend_index(&mut self) {
        while let Some(number) = self.first_unindexed {
            self.add_to_index(number);
            let next = self.entries[number as usize].neighbours.forward;
            self.first_unindexed = (next != NO_ENTRY).then_some(next);
        }
        self.unindexed_count = 0;
    }

    #[inline(never)]
    fn add_to_index(&mut self, number: u32) {
        let entry = &mut self.entries[number as usize];
        entry.is_indexed = true;
        for (list, key) in IndexKey::all_of(entry.header).into_iter().enumerate() {
            let ends = self.index.entry(key).or_default();
            let previous = std::mem::replace(&mut ends.backward, number);
            if previous == NO_ENTRY {
                ends.forward = number;
            } else {
                self.entries[previous as usize].index_neighbours[list].forward = number;
            }
            self.entries[number as usize].index_neighbours[list] = Links {
                forward: NO_ENTRY,
                backward: previous,
            };
        }
    }

    #[inline(never)]
    fn remove_from_index(&mut self, number: u32) {
        let header = self.entries[number as usize].header;
        for (list, key) in IndexKey::all_of(header).into_iter().enumerate() {
            let Links { forward, backward } = self.entries[number as usize].index_neighbours[list];
            if forward != NO_ENTRY {
                self.entries[forward as usize].index_neighbours[list].backward = backward;
            }
            if backward != NO_ENTRY {
                self.entries[backward as usize].index_neighbours[list].forward = forward;
            }
            if forward == NO_ENTRY && backward == NO_ENTRY {
                self.index.remove(&key);
            } else if (forward == NO_ENTRY || backward == NO_ENTRY)
                && let Some(ends) = self.index.get_mut(&key)
            {
                if forward == NO_ENTRY {
                    ends.backward = backward;
                } else {
                    ends.forward = forward;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// An operation of a program or its peers on the list.
    #[derive(Clone, Debug)]
    enum Operation {
        Push(Header),
        /// A message is received if one matches.
        Receive(Request),
        /// The oldest match is looked up and stays.
        Probe(Request),
        /// The message at this position, modulo the length, is removed.
        Free(usize),
        /// The header of the message at this position, modulo the length, changes.
        ChangeHeader(usize, Header),
        /// The messages from this number on are listed.
        ListSince(u64),
    }

    fn small_header() -> impl Strategy<Value = Header> {
        (0..3i32, -1..4i32, 0..2i32).prop_map(|(src, tag, ctx)| Header { src, tag, ctx })
    }

    fn small_request() -> impl Strategy<Value = Request> {
        (-1..4i32, -1..5i32, -1..2i32).prop_map(|(src, tag, ctx)| Request { src, tag, ctx })
    }

    fn operation() -> impl Strategy<Value = Operation> {
        prop_oneof![
            12 => small_header().prop_map(Operation::Push),
            6 => small_request().prop_map(Operation::Receive),
            3 => small_request().prop_map(Operation::Probe),
            2 => any::<usize>().prop_map(Operation::Free),
            1 => (any::<usize>(), small_header())
                .prop_map(|(position, header)| Operation::ChangeHeader(position, header)),
            1 => (0..300u64).prop_map(Operation::ListSince),
        ]
    }

    /// The list, and a plain vector of the same messages that is searched one by one.
    #[derive(Default)]
    struct Model {
        list: ReceivableList,
        /// Header and place of each message that was ever in the list, by number.
        messages: Vec<(Header, ListEntry)>,
        /// Numbers of the messages in the list, oldest first.
        listed: Vec<usize>,
    }

    impl Model {
        fn push(&mut self, header: Header) {
            let number = self.messages.len();
            let list_entry = self.list.push(number as i32, header);
            self.messages.push((header, list_entry));
            self.listed.push(number);
        }

        fn remove_at(&mut self, position: usize) {
            let number = self.listed.remove(position);
            self.list.remove(self.messages[number].1);
        }

        /// Returns the position that both searches find.
        fn find(&mut self, request: &Request) -> Option<usize> {
            let messages = &self.messages;
            let found_mid = self
                .list
                .find(request, |mid| Some(messages[mid as usize].0));
            let position = self
                .listed
                .iter()
                .position(|number| request.matches(messages[*number].0));
            let expected_mid = position.map(|position| self.listed[position] as i32);
            assert_eq!(found_mid, expected_mid, "{request:?}");
            position
        }

        fn apply(&mut self, operation: Operation) {
            match operation {
                Operation::Push(header) => self.push(header),
                Operation::Receive(request) => {
                    if let Some(position) = self.find(&request) {
                        self.remove_at(position);
                    }
                }
                Operation::Probe(request) => drop(self.find(&request)),
                Operation::Free(position) if !self.listed.is_empty() => {
                    self.remove_at(position % self.listed.len())
                }
                Operation::ChangeHeader(position, header) if !self.listed.is_empty() => {
                    self.list.expect_header_change();
                    self.messages[self.listed[position % self.listed.len()]].0 = header;
                }
                Operation::Free(_) | Operation::ChangeHeader(..) => {}
                Operation::ListSince(seq) => {
                    let expected: Vec<i32> = self
                        .listed
                        .iter()
                        .filter(|number| **number as u64 >= seq)
                        .map(|number| *number as i32)
                        .collect();
                    assert_eq!(self.list.mids_since(seq).collect::<Vec<i32>>(), expected);
                }
            }
        }
    }

    proptest! {
        /// The index finds the same messages as a search of all messages.
        #[test]
        fn index_finds_what_linear_search_finds(
            operations in prop::collection::vec(operation(), 1..400),
        ) {
            let mut model = Model::default();
            operations.into_iter().for_each(|operation| model.apply(operation));
            while !model.listed.is_empty() {
                model.remove_at(model.listed.len() / 2);
            }
            prop_assert!(model.list.index.is_empty(), "the index forgets removed messages");
            prop_assert_eq!(model.list.mids_since(0).count(), 0);
        }
    }

    /// A search of many messages leaves none to be examined one by one.
    #[test]
    fn long_list_is_searched_by_its_index() {
        let mut model = Model::default();
        for number in 0..5000 {
            model.push(Header {
                src: number % 7,
                tag: number % 11,
                ctx: 0,
            });
        }
        let absent = Request {
            src: 3,
            tag: 99,
            ctx: 0,
        };
        assert_eq!(model.find(&absent), None);
        assert_eq!(model.list.unindexed_count, 0);
        assert_eq!(model.list.first_unindexed, None);
        let oldest_of_sender = Request { tag: -1, ..absent };
        assert_eq!(model.find(&oldest_of_sender), Some(3));
    }

    #[test]
    fn memory_is_reused() {
        let mut model = Model::default();
        for _ in 0..100 {
            for tag in 0..50 {
                model.push(Header {
                    src: 1,
                    tag,
                    ctx: 0,
                });
            }
            let any = Request {
                src: -1,
                tag: -1,
                ctx: 0,
            };
            while let Some(position) = model.find(&any) {
                model.remove_at(position);
            }
        }
        assert_eq!((model.list.entries.len(), model.list.index.len()), (50, 0));
    }
}
