//! The mailbox of the virtual machine (`pvm_putinfo` and related calls). Only the master has it.
//!
//! Entries are grouped into classes by name and have an index within their class. When the owner of
//! an entry exits, a persistent entry remains without an owner ([`Tid::NONE`]); all other entries
//! are removed. A task that requests a missing entry with `PvmMboxWaitForInfo` waits until the
//! entry is stored. A checkpoint saves the entries of the job's tasks, and a restart stores them
//! again.

use super::Machine;
use super::service_order::ServiceObject;
use sempa_proto::checkpoint::{SAVED_MAILBOX_BYTES_MAX, SavedMailboxEntry};
use sempa_proto::task::{MailboxClass, MailboxRequest, Reply, TEXT_FIELD_BYTES_MAX};
use sempa_proto::{Message, PvmError, RequestId, Tid};
use std::collections::{BTreeMap, BTreeSet};

/// Largest number of entries in all classes.
pub(super) const MAILBOX_ENTRIES_MAX: usize = 262_144;
/// Largest total size of all stored messages, in bytes.
pub(super) const MAILBOX_BYTES_MAX: usize = 1 << 30;
/// Largest number of requests that may wait for an entry.
pub(super) const WAITING_TAKES_MAX: usize = 65_536;

const PERSISTENT_FLAG: i32 = 1;
const MULTI_INSTANCE_FLAG: i32 = 2;
const OVERWRITABLE_FLAG: i32 = 4;
const FIRST_AVAILABLE_FLAG: i32 = 8;
const READ_AND_DELETE_FLAG: i32 = 16;
const WAIT_FLAG: i32 = 32;
/// Number of bits by which the flags are shifted right to get the index that a request chooses.
const DIRECT_INDEX_SHIFT: i32 = 10;
/// Bits of a direct index, after the shift. PVM ignores higher bits.
const DIRECT_INDEX_MASK: i32 = (1 << 21) - 1;

type MailboxError = (PvmError, String);

#[derive(Debug)]
struct MailboxEntry {
    owner: Tid,
    flags: i32,
    message: Message,
}

#[derive(Debug)]
struct WaitingTake {
    tid: Tid,
    id: RequestId,
    name: String,
    index: i32,
    flags: i32,
}

#[derive(Debug, Default)]
pub(super) struct Mailbox {
    classes: BTreeMap<String, BTreeMap<i32, MailboxEntry>>,
    entry_count: usize,
    stored_bytes: usize,
    waiting_takes: Vec<WaitingTake>,
}

impl Mailbox {
    fn put_entry(
        &mut self,
        owner: Tid,
        name: &str,
        flags: i32,
        message: Message,
    ) -> Result<i32, MailboxError> {
        if name.is_empty() || name.len() > TEXT_FIELD_BYTES_MAX {
            return Err((
                PvmError::BadParam,
                format!("a mailbox class needs a name of 1 to {TEXT_FIELD_BYTES_MAX} bytes"),
            ));
        }
        if self.entry_count >= MAILBOX_ENTRIES_MAX
            || self.stored_bytes + message.body.len() > MAILBOX_BYTES_MAX
        {
            let limit_reason = format!(
                "the mailbox holds {MAILBOX_ENTRIES_MAX} entries and {MAILBOX_BYTES_MAX} bytes at most"
            );
            return Err((PvmError::OutOfRes, limit_reason));
        }
        let class = self.classes.entry(name.to_string()).or_default();
        let mut index = flags >> DIRECT_INDEX_SHIFT & DIRECT_INDEX_MASK;
        if flags & MULTI_INSTANCE_FLAG != 0 {
            while class.contains_key(&index) {
                index += 1;
            }
        } else if let Some(old_entry) = class.get(&index)
            && old_entry.owner != owner
            && old_entry.flags & OVERWRITABLE_FLAG == 0
        {
            let reason = format!("entry {index} of {name} belongs to {}", old_entry.owner);
            return Err((PvmError::Denied, reason));
        }
        self.entry_count += 1;
        self.stored_bytes += message.body.len();
        if let Some(old_entry) = class.insert(
            index,
            MailboxEntry {
                owner,
                flags,
                message,
            },
        ) {
            self.entry_count -= 1;
            self.stored_bytes -= old_entry.message.body.len();
        }
        Ok(index)
    }

    fn find_index(&self, name: &str, index: i32, flags: i32) -> Option<i32> {
        let class = self.classes.get(name)?;
        if flags & FIRST_AVAILABLE_FLAG != 0 {
            class
                .range(index..)
                .next()
                .map(|(entry_index, _)| *entry_index)
        } else {
            class.contains_key(&index).then_some(index)
        }
    }

    fn read_entry(
        &mut self,
        tid: Tid,
        name: &str,
        index: i32,
        flags: i32,
    ) -> Result<Message, MailboxError> {
        if index < 0 {
            return Err((PvmError::BadParam, "a mailbox index is not negative".into()));
        }
        let Some(entry_index) = self.find_index(name, index, flags) else {
            return Err(not_found(name, index));
        };
        if flags & READ_AND_DELETE_FLAG != 0 {
            return self
                .remove_entry(tid, name, entry_index)
                .map(|entry| entry.message);
        }
        let entry = self
            .classes
            .get(name)
            .and_then(|class| class.get(&entry_index));
        entry
            .map(|e| e.message.clone())
            .ok_or_else(|| not_found(name, index))
    }

    /// Removes an entry. Fails if another task owns the entry and the entry is not overwritable.
    fn remove_entry(
        &mut self,
        tid: Tid,
        name: &str,
        index: i32,
    ) -> Result<MailboxEntry, MailboxError> {
        if index < 0 {
            return Err((PvmError::BadParam, "a mailbox index is not negative".into()));
        }
        let class = self
            .classes
            .get_mut(name)
            .ok_or_else(|| not_found(name, index))?;
        let entry = class.get(&index).ok_or_else(|| not_found(name, index))?;
        if entry.owner != tid && entry.flags & OVERWRITABLE_FLAG == 0 {
            return Err((
                PvmError::Denied,
                format!("entry {index} of {name} belongs to {}", entry.owner),
            ));
        }
        let entry = class.remove(&index).expect("just found");
        self.entry_count -= 1;
        self.stored_bytes -= entry.message.body.len();
        if class.is_empty() {
            self.classes.remove(name);
        }
        Ok(entry)
    }

    fn matching_classes(&self, pattern: &str) -> Vec<MailboxClass> {
        let selected_classes = self
            .classes
            .iter()
            .filter(|(name, _)| matches_pattern(name, pattern));
        selected_classes
            .map(|(name, class)| MailboxClass {
                name: name.clone(),
                entries: class
                    .iter()
                    .map(|(index, e)| (*index, e.owner, e.flags))
                    .collect(),
            })
            .collect()
    }

    /// Returns one line per entry, for the daemon's log.
    pub(super) fn log_lines(&self) -> Vec<String> {
        let class_lines = |(name, entries): (&String, &BTreeMap<i32, MailboxEntry>)| {
            let entry_line = |(index, e): (&i32, &MailboxEntry)| {
                format!("{name} {index} owner {} flags {:#x}", e.owner, e.flags)
            };
            entries.iter().map(entry_line).collect::<Vec<_>>()
        };
        self.classes.iter().flat_map(class_lines).collect()
    }

    /// Returns the owners of all entries of a class.
    pub(super) fn owners(&self, name: &str) -> Vec<Tid> {
        self.classes
            .get(name)
            .map(|class| class.values().map(|e| e.owner).collect())
            .unwrap_or_default()
    }

    /// Returns all tasks that own an entry or wait for an entry. A task may be contained several
    /// times.
    pub(super) fn involved_tasks(&self) -> Vec<Tid> {
        let owners = self
            .classes
            .values()
            .flat_map(|class| class.values().map(|e| e.owner));
        owners
            .chain(self.waiting_takes.iter().map(|w| w.tid))
            .collect()
    }

    /// Returns the requests that wait for an entry to be stored.
    pub(super) fn waiting_requests(&self) -> impl Iterator<Item = (Tid, RequestId)> {
        self.waiting_takes.iter().map(|take| (take.tid, take.id))
    }

    /// Returns the entries of these owners, for a checkpoint.
    ///
    /// # Errors
    /// The size of the entries in bytes, if it exceeds [`SAVED_MAILBOX_BYTES_MAX`].
    pub(super) fn entries_of(&self, owners: &[Tid]) -> Result<Vec<SavedMailboxEntry>, usize> {
        let owners: BTreeSet<Tid> = owners.iter().copied().collect();
        let all_entries = self
            .classes
            .iter()
            .flat_map(|(name, class)| class.iter().map(move |(index, entry)| (name, index, entry)));
        let owned_entries: Vec<_> = all_entries
            .filter(|(.., entry)| owners.contains(&entry.owner))
            .collect();
        let bytes = owned_entries
            .iter()
            .map(|(name, _, entry)| name.len() + entry.message.body.len())
            .sum();
        if bytes > SAVED_MAILBOX_BYTES_MAX {
            return Err(bytes);
        }
        let saved_entry =
            |(name, index, entry): (&String, &i32, &MailboxEntry)| SavedMailboxEntry {
                name: name.clone(),
                index: *index,
                owner: entry.owner,
                flags: entry.flags,
                message: entry.message.clone(),
            };
        Ok(owned_entries.into_iter().map(saved_entry).collect())
    }

    /// Returns the class and index of each saved entry in whose place the mailbox has an entry of
    /// another owner. Entries without an owner do not conflict: the saved tasks themselves may have
    /// stored them.
    pub(super) fn conflicting_entries(&self, saved_entries: &[SavedMailboxEntry]) -> Vec<String> {
        let conflicts = saved_entries.iter().filter(|entry| self.is_conflict(entry));
        conflicts
            .map(|entry| format!("{} {}", entry.name, entry.index))
            .collect()
    }

    fn is_conflict(&self, entry: &SavedMailboxEntry) -> bool {
        let existing_entry = self
            .classes
            .get(&entry.name)
            .and_then(|class| class.get(&entry.index));
        existing_entry.is_some_and(|existing_entry| {
            existing_entry.owner != Tid::NONE && existing_entry.owner != entry.owner
        })
    }

    /// True if all saved entries can be added within the limits.
    pub(super) fn has_room_for(&self, saved_entries: &[SavedMailboxEntry]) -> bool {
        let bytes: usize = saved_entries
            .iter()
            .map(|entry| entry.message.body.len())
            .sum();
        self.entry_count + saved_entries.len() <= MAILBOX_ENTRIES_MAX
            && self.stored_bytes + bytes <= MAILBOX_BYTES_MAX
    }

    /// Stores saved entries again. An entry that another owner has stored in the meantime is not
    /// replaced.
    fn restore_entries(&mut self, saved_entries: Vec<SavedMailboxEntry>) {
        for entry in saved_entries {
            if self.is_conflict(&entry) {
                continue;
            }
            let SavedMailboxEntry {
                name,
                index,
                owner,
                flags,
                message,
            } = entry;
            self.entry_count += 1;
            self.stored_bytes += message.body.len();
            if let Some(old_entry) = self.classes.entry(name).or_default().insert(
                index,
                MailboxEntry {
                    owner,
                    flags,
                    message,
                },
            ) {
                self.entry_count -= 1;
                self.stored_bytes -= old_entry.message.body.len();
            }
        }
    }

    /// Handles the exit of a task: removes its waiting requests and its entries. Its persistent
    /// entries remain without an owner.
    pub(super) fn remove_owner(&mut self, tid: Tid) {
        self.waiting_takes.retain(|w| w.tid != tid);
        self.retain_entries(|_, _, entry| {
            if entry.owner != tid {
                return true;
            }
            entry.owner = Tid::NONE;
            entry.flags & PERSISTENT_FLAG != 0
        });
    }

    /// Removes persistent entries without an owner. `survivors` lists the tasks that a reset does
    /// not end; if this list is given, the persistent entries of all other tasks are removed, too.
    pub(super) fn remove_for_reset(&mut self, survivors: Option<&[Tid]>) {
        self.retain_entries(|_, _, entry| {
            let owner_is_ended =
                survivors.is_some_and(|survivors| !survivors.contains(&entry.owner));
            entry.flags & PERSISTENT_FLAG == 0 || !(entry.owner == Tid::NONE || owner_is_ended)
        });
    }

    /// Removes persistent entries without an owner: those of all classes if `name` is empty,
    /// otherwise those of one class. An `index` restricts the removal to entries with this index.
    fn remove_unowned(&mut self, name: &str, index: Option<i32>) {
        self.retain_entries(|class, entry_index, entry| {
            let is_selected = (name.is_empty() || class == name)
                && index.is_none_or(|index| index == entry_index);
            !is_selected || entry.flags & PERSISTENT_FLAG == 0 || entry.owner != Tid::NONE
        });
    }

    fn retain_entries(
        &mut self,
        mut must_retain: impl FnMut(&str, i32, &mut MailboxEntry) -> bool,
    ) {
        let (mut remaining_entry_count, mut bytes) = (0, 0);
        for (name, class) in &mut self.classes {
            class.retain(|index, entry| must_retain(name, *index, entry));
            remaining_entry_count += class.len();
            bytes += class.values().map(|e| e.message.body.len()).sum::<usize>();
        }
        self.classes.retain(|_, class| !class.is_empty());
        (self.entry_count, self.stored_bytes) = (remaining_entry_count, bytes);
    }
}

/// True if a request with these flags may wait until the entry is stored.
pub(super) fn may_wait(flags: i32) -> bool {
    flags & WAIT_FLAG != 0
}

impl Machine {
    /// Executes a task's mailbox request, on the master only. The reply to a request that waits for
    /// an entry is sent when the entry is stored.
    pub(super) fn handle_mailbox_request(
        &mut self,
        tid: Tid,
        id: RequestId,
        request: MailboxRequest,
    ) {
        self.begin_service_use(tid, id, ServiceObject::of_mailbox_request(&request));
        let Some(master) = &mut self.master else {
            return;
        };
        let mailbox = &mut master.mailbox;
        let mut was_stored = false;
        let reply = match request {
            MailboxRequest::Put {
                name,
                flags,
                message,
            } => {
                let put_result = mailbox.put_entry(tid, &name, flags, message);
                was_stored = put_result.is_ok();
                put_result.map(Reply::MailboxIndex)
            }
            MailboxRequest::Take { name, index, flags } => {
                match mailbox.read_entry(tid, &name, index, flags) {
                    Err((PvmError::NotFound, _))
                        if flags & WAIT_FLAG != 0
                            && mailbox.waiting_takes.len() < WAITING_TAKES_MAX =>
                    {
                        mailbox.waiting_takes.push(WaitingTake {
                            tid,
                            id,
                            name,
                            index,
                            flags,
                        });
                        return;
                    }
                    read_result => read_result.map(Reply::Mailbox),
                }
            }
            MailboxRequest::Delete { name, index } => {
                mailbox.remove_entry(tid, &name, index).map(|_| Reply::Done)
            }
            MailboxRequest::Clean { name, index } => {
                mailbox.remove_unowned(&name, index);
                Ok(Reply::Done)
            }
            MailboxRequest::List { pattern } => {
                Ok(Reply::MailboxClasses(mailbox.matching_classes(&pattern)))
            }
        };
        self.reply_in_order(tid, id, reply);
        if was_stored {
            self.serve_waiting_takes();
        }
    }

    /// Stores the entries of tasks that are restarted from a checkpoint, and answers the requests
    /// that wait for these entries. Only the master does this.
    pub(super) fn restore_mailbox(&mut self, saved_entries: Vec<SavedMailboxEntry>) {
        let Some(master) = &mut self.master else {
            return;
        };
        master.mailbox.restore_entries(saved_entries);
        self.serve_waiting_takes();
    }

    /// Answers the waiting requests whose entry exists, in the order of their arrival.
    fn serve_waiting_takes(&mut self) {
        let mut i = 0;
        while let Some(master) = &mut self.master
            && i < master.mailbox.waiting_takes.len()
        {
            let request = &master.mailbox.waiting_takes[i];
            let (tid, id, name, index, flags) = (
                request.tid,
                request.id,
                request.name.clone(),
                request.index,
                request.flags,
            );
            match master.mailbox.read_entry(tid, &name, index, flags) {
                Err((PvmError::NotFound, _)) => i += 1,
                read_result => {
                    master.mailbox.waiting_takes.remove(i);
                    self.reply_in_order(tid, id, read_result.map(Reply::Mailbox));
                }
            }
        }
    }
}

fn not_found(name: &str, index: i32) -> MailboxError {
    (
        PvmError::NotFound,
        format!("the mailbox has no entry {index} of {name}"),
    )
}

/// True if the name matches PVM's pattern: `*` matches any text, and the substrings between the
/// asterisks must occur in this order anywhere in the name.
fn matches_pattern(name: &str, pattern: &str) -> bool {
    let mut rest = name;
    pattern
        .split('*')
        .all(|substring| match rest.find(substring) {
            Some(offset) => {
                rest = &rest[offset + substring.len()..];
                true
            }
            None => false,
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    fn message(text: &'static str) -> Message {
        let (src, dst) = (Tid::NONE, Tid::NONE);
        Message {
            src,
            dst,
            ctx: 0,
            tag: 0,
            wid: 0,
            enc: 0,
            body: Bytes::from_static(text.as_bytes()),
        }
    }

    /// The owner of an entry can replace it. Another task can replace the entry only if the entry
    /// is overwritable.
    #[test]
    fn only_overwritable_entries_yield_to_others() {
        let (a, b) = (Tid::from_raw(0x40001), Tid::from_raw(0x40002));
        let mut m = Mailbox::default();
        assert_eq!(m.put_entry(a, "x", 0, message("1")), Ok(0));
        assert_eq!(
            m.put_entry(b, "x", 0, message("2")).map_err(|e| e.0),
            Err(PvmError::Denied)
        );
        assert_eq!(m.put_entry(a, "x", OVERWRITABLE_FLAG, message("3")), Ok(0));
        assert_eq!(m.put_entry(b, "x", 0, message("4")), Ok(0));
        assert_eq!(m.read_entry(a, "x", 0, 0), Ok(message("4")));
        assert_eq!(
            m.put_entry(a, "x", MULTI_INSTANCE_FLAG, message("5")),
            Ok(1)
        );
        assert_eq!(
            m.put_entry(
                a,
                "x",
                MULTI_INSTANCE_FLAG | (7 << DIRECT_INDEX_SHIFT),
                message("6")
            ),
            Ok(7)
        );
        assert_eq!(
            m.read_entry(a, "x", 2, FIRST_AVAILABLE_FLAG | READ_AND_DELETE_FLAG),
            Ok(message("6"))
        );
        assert_eq!(
            m.read_entry(a, "x", 7, 0).map_err(|e| e.0),
            Err(PvmError::NotFound)
        );
        assert_eq!((m.entry_count, m.stored_bytes), (2, 2));
    }

    /// The entries of a task that exits are removed, except persistent entries. Persistent entries
    /// lose their owner and are removed by a reset.
    #[test]
    fn persistent_entries_survive_their_owner() {
        let a = Tid::from_raw(0x40001);
        let mut m = Mailbox::default();
        m.put_entry(a, "x", 0, message("1")).expect("free");
        m.put_entry(a, "y", PERSISTENT_FLAG, message("2"))
            .expect("free");
        m.remove_owner(a);
        assert_eq!(
            m.matching_classes("")
                .iter()
                .map(|c| c.name.as_str())
                .collect::<Vec<_>>(),
            ["y"]
        );
        assert_eq!(
            m.remove_entry(a, "y", 0).map(|_| ()).map_err(|e| e.0),
            Err(PvmError::Denied)
        );
        m.remove_for_reset(None);
        assert_eq!(
            (m.matching_classes("").len(), m.entry_count, m.stored_bytes),
            (0, 0, 0)
        );
    }

    /// A restart stores the saved entries again, except where another owner has an entry. Saving
    /// fails above the size limit.
    #[test]
    fn restore_skips_indexes_of_other_owners() {
        let (a, b) = (Tid::from_raw(0x40001), Tid::from_raw(0x40002));
        let mut m = Mailbox::default();
        m.put_entry(a, "x", PERSISTENT_FLAG, message("1"))
            .expect("free");
        m.put_entry(
            a,
            "y",
            MULTI_INSTANCE_FLAG | (7 << DIRECT_INDEX_SHIFT),
            message("2"),
        )
        .expect("free");
        m.put_entry(b, "y", MULTI_INSTANCE_FLAG, message("3"))
            .expect("free");
        let saved_entries = m.entries_of(&[a]).expect("little");
        assert_eq!(
            saved_entries
                .iter()
                .map(|e| (e.name.as_str(), e.index))
                .collect::<Vec<_>>(),
            [("x", 0), ("y", 7)]
        );
        m.put_entry(a, "x", 0, message("later")).expect("its own");
        m.remove_owner(a);
        assert_eq!(m.conflicting_entries(&saved_entries), [""; 0]);
        m.restore_entries(saved_entries.clone());
        assert_eq!(
            (m.read_entry(b, "x", 0, 0), m.read_entry(b, "y", 7, 0)),
            (Ok(message("1")), Ok(message("2")))
        );
        assert_eq!((m.entry_count, m.stored_bytes), (3, 3));
        m.remove_owner(a);
        m.put_entry(b, "y", 7 << DIRECT_INDEX_SHIFT, message("4"))
            .expect("free");
        assert_eq!(m.conflicting_entries(&saved_entries), ["y 7"]);
        m.restore_entries(saved_entries);
        assert_eq!(m.read_entry(a, "y", 7, 0), Ok(message("4")));
        m.put_entry(
            a,
            "z",
            0,
            Message {
                body: Bytes::from(vec![0; SAVED_MAILBOX_BYTES_MAX]),
                ..message("")
            },
        )
        .expect("free");
        assert_eq!(m.entries_of(&[a]), Err(SAVED_MAILBOX_BYTES_MAX + 3));
    }

    /// Cleaning removes only entries without an owner, and only those with the selected class and
    /// index.
    #[test]
    fn clean_removes_only_selected_unowned_entries() {
        let (a, b) = (Tid::from_raw(0x40001), Tid::from_raw(0x40002));
        let mut m = Mailbox::default();
        for name in ["x", "y", "z"] {
            m.put_entry(a, name, PERSISTENT_FLAG | MULTI_INSTANCE_FLAG, message("1"))
                .expect("free");
            m.put_entry(a, name, PERSISTENT_FLAG | MULTI_INSTANCE_FLAG, message("2"))
                .expect("free");
        }
        m.put_entry(b, "x", PERSISTENT_FLAG | MULTI_INSTANCE_FLAG, message("3"))
            .expect("free");
        m.remove_owner(a);
        let remaining_counts = |m: &Mailbox| -> Vec<usize> {
            m.matching_classes("")
                .iter()
                .map(|class| class.entries.len())
                .collect()
        };
        m.remove_unowned("x", Some(1));
        assert_eq!(remaining_counts(&m), [2, 2, 2]);
        m.remove_unowned("y", None);
        assert_eq!(remaining_counts(&m), [2, 2]);
        m.remove_unowned("", None);
        assert_eq!(
            (remaining_counts(&m), m.entry_count),
            (vec![1], 1),
            "that of b"
        );
    }

    #[test]
    fn patterns_match_as_in_pvm() {
        assert!(
            matches_pattern("OW", "O")
                && matches_pattern("OW", "")
                && matches_pattern("pvmgs", "p*gs")
        );
        assert!(!matches_pattern("OW", "X") && !matches_pattern("abc", "c*a"));
    }
}
