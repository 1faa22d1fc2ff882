//! Files of a directory on their way to another host: what is sent for them, and what is made of that there.
//!
//! A directory may be sent while it is still being written. Files that only grow are followed then; when the directory is
//! complete, the rest of them travels, and all other files. What has left of such a file is given back to the file system at
//! once: where that is memory, nothing is there twice, and what was just given back takes up what comes next. Runs of zeros are
//! counted and not sent, and become holes at the other end. Nothing counts before the end mark, which has the counts of
//! everything; whoever began to write anew, in a new directory of the same name, has the other end begin anew as well.

use super::bulk::{CONTENT_BYTES_MAX, Incoming, Outgoing};
use super::rate::Rate;
use super::zeros::{self, Part};
use nix::fcntl::{FallocateFlags, fallocate};
use sempa_proto::frame::{from_bytes, to_bytes};
use sempa_proto::migration::Failure;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Bytes of a file in one record at most.
const PIECE_BYTES: usize = zeros::PLAIN_BYTES_MAX;
/// What a record is, and the number of the file that a piece belongs to.
const PIECE_HEAD_BYTES: usize = 5;
const MARK: u8 = 0;
const PIECE: u8 = 1;
/// Files of one move at most.
const IMAGE_FILES_MAX: u32 = 65_536;
/// Bytes of one move at most.
const IMAGE_BYTES_MAX: u64 = 1 << 42;
/// Bytes of a file name at most (NAME_MAX).
const NAME_BYTES_MAX: usize = 255;
/// Files that are open at the same time at most.
const OPEN_FILES_MAX: usize = 64;
/// How often a directory may be begun anew: more often than a dump is tried where many are in each other's way.
const ANEW_MAX: u32 = 256;
/// How often a directory is looked at while it is being written.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// Names of the engine's files that only grow while they are being written: the contents of memory.
const GROWS: (&str, &str) = ("pages-", ".img");

/// What stands between the pieces of files.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Mark {
    /// A file begins; they are counted from 0.
    File { number: u32, name: String },
    /// It has ended and is so long.
    FileEnd { number: u32, bytes: u64 },
    /// All that came is void.
    Anew,
    /// All files have been sent.
    End { files: u32, bytes: u64 },
}

/// Whether a directory is complete.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum State {
    /// It is being written.
    #[default]
    Growing,
    /// Nothing is written to it any more.
    Complete,
    /// Nobody wants it any more.
    Void,
}

/// The state of the directory that is being sent, for whoever sends it.
#[derive(Debug, Default)]
pub(super) struct Progress {
    state: Mutex<State>,
    changed: Condvar,
}

impl Progress {
    /// It changes once; what comes later counts nothing.
    pub(super) fn turn(&self, state: State) {
        let mut now = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if *now == State::Growing {
            *now = state;
        }
        drop(now);
        self.changed.notify_all();
    }

    /// The state, after waiting a little for it to change.
    fn wait(&self, at_most: Duration) -> State {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(state, at_most, |state| *state == State::Growing);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// The state that it has changed to.
    fn changed(&self) -> State {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_while(state, |state| *state == State::Growing);
        *waited.unwrap_or_else(PoisonError::into_inner)
    }
}

fn io(act: &str, path: &Path) -> impl FnOnce(io::Error) -> Failure {
    let what = format!("{act} {}", path.display());
    move |e| Failure::Io(format!("{what}: {e}"))
}

fn not_taken(e: io::Error) -> Failure {
    Failure::Images(format!("the target took no more: {e}"))
}

fn is_same(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// A directory as it was when it was opened: one that takes its name later is another, and none of its files is found here. That
/// matters because what was sent is given back: nothing may be given back that is to be sent once more.
struct Folder {
    open: File,
    /// By which its files are reached.
    path: PathBuf,
}

impl Folder {
    fn open(path: &Path) -> io::Result<Folder> {
        let open = File::open(path)?;
        // As long as it is open no other one has its inode number.
        let path = PathBuf::from(format!("/proc/self/fd/{}", open.as_raw_fd()));
        Ok(Folder { open, path })
    }

    /// The names of its files.
    fn names(&self) -> io::Result<Vec<String>> {
        let unfit = |name| io::Error::new(ErrorKind::InvalidData, format!("{name:?} is no name of an image"));
        std::fs::read_dir(&self.path)?.map(|entry| entry?.file_name().into_string().map_err(unfit)).collect()
    }

    /// Its files in the order of their names, with what the system says of each.
    fn entries(&self) -> io::Result<Vec<(String, Metadata)>> {
        let mut names = self.names()?;
        names.sort();
        let about = |name: String| std::fs::symlink_metadata(self.path.join(&name)).map(|meta| (name, meta));
        names.into_iter().map(about).collect()
    }
}

/// A file that was sent in part.
struct Begun {
    number: u32,
    file: File,
    sent: u64,
    /// What was sent is not kept.
    used_up: bool,
}

impl Begun {
    /// Gives back what was sent last. A file system that cannot do that keeps it.
    fn give_back(&self, bytes: usize) {
        if self.used_up {
            let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            let _ = fallocate(&self.file, flags, (self.sent - bytes as u64) as i64, bytes as i64);
        }
    }

    /// True if this is the file, and nothing that was sent of it is void.
    fn is(&self, meta: &Metadata) -> bool {
        self.file.metadata().is_ok_and(|own| is_same(&own, meta)) && self.sent <= meta.len()
    }
}

/// Sends the files of a directory.
pub(super) struct Sender<'a, W> {
    dir: &'a Path,
    /// What is sent of it so far is of this one.
    folder: Option<Folder>,
    out: Outgoing<W>,
    rate: &'a Rate,
    /// By name.
    begun: BTreeMap<String, Begun>,
    files: u32,
    bytes: u64,
    /// Of these, what left before the directory was complete.
    ahead: u64,
    /// Bytes that have left for the pieces.
    left: u64,
    /// Bytes of files of directories that were given up.
    in_vain: u64,
}

/// What was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sent {
    /// Of files.
    pub(super) bytes: u64,
    /// Of these, what left before the directory was complete.
    pub(super) ahead: u64,
    /// Bytes that have left for them.
    pub(super) left: u64,
    /// Bytes of files of directories that were given up for this one.
    pub(super) in_vain: u64,
}

impl<'a, W: Write> Sender<'a, W> {
    /// Nothing is sent yet. Pieces leave at this rate at most.
    pub(super) fn new(dir: &'a Path, out: Outgoing<W>, rate: &'a Rate) -> Sender<'a, W> {
        Sender {
            dir,
            folder: None,
            out,
            rate,
            begun: BTreeMap::new(),
            files: 0,
            bytes: 0,
            ahead: 0,
            left: 0,
            in_vain: 0,
        }
    }

    /// Sends what there is and what comes, to the end mark.
    pub(super) fn send(mut self, progress: &Progress) -> Result<Sent, Failure> {
        loop {
            match progress.wait(LOOK_EVERY) {
                State::Growing => match self.follow() {
                    // What cannot be read may be badly written: it is for those who judge that to say so.
                    Err(unread @ Failure::Io(_)) if progress.changed() == State::Complete => return Err(unread),
                    Err(Failure::Io(_)) => {}
                    followed => followed?,
                },
                State::Complete => return self.finish(),
                State::Void => return Err(Failure::CalledOff("the transfer was broken off".into())),
            }
        }
    }

    /// Opens the directory, if it is there; whatever was sent of one that had its name before is void.
    fn find(&mut self) -> Result<(), Failure> {
        let there = std::fs::symlink_metadata(self.dir).map_err(io("read", self.dir))?;
        let is_it = |folder: &Folder| folder.open.metadata().is_ok_and(|own| is_same(&own, &there));
        if self.folder.as_ref().is_some_and(is_it) {
            return Ok(());
        }
        let folder = Folder::open(self.dir).map_err(io("read", self.dir))?;
        self.folder = Some(folder);
        if self.files > 0 {
            self.mark(&Mark::Anew)?;
            self.begun.clear();
            self.in_vain += self.bytes;
            (self.files, self.bytes, self.left) = (0, 0, 0);
        }
        Ok(())
    }

    /// Sends what files have grown by.
    fn follow(&mut self) -> Result<(), Failure> {
        // It may not be there yet, or not be there any more: it is looked at once more when it is complete.
        match self.find() {
            Err(Failure::Io(_)) => return Ok(()),
            found => found?,
        }
        let Some(folder) = &self.folder else { return Ok(()) };
        let path = folder.path.clone();
        // A file may have gone in between.
        for name in folder.names().unwrap_or_default() {
            let grows = name.starts_with(GROWS.0) && name.ends_with(GROWS.1);
            if grows && !self.begun.contains_key(&name) && self.begun.len() < OPEN_FILES_MAX - 1 {
                let Ok(file) = OpenOptions::new().read(true).write(true).open(path.join(&name)) else { continue };
                self.begin(name, file, true)?;
            }
        }
        let names: Vec<String> = self.begun.keys().cloned().collect();
        for name in names {
            let length = self.begun[&name].file.metadata().map_err(io("read", &self.dir.join(&name)))?.len();
            // Whole pieces only: what is left will be more soon, or goes with the rest.
            let whole = length - length % PIECE_BYTES as u64;
            self.send_to(&name, whole)?;
        }
        Ok(())
    }

    /// Sends the rest of all files.
    fn finish(mut self) -> Result<Sent, Failure> {
        self.find()?;
        let folder = self.folder.as_ref().expect("it was found");
        let entries = folder.entries().map_err(io("read", self.dir))?;
        let path = folder.path.clone();
        if let Some((name, _)) = entries.iter().find(|(_, meta)| !meta.is_file()) {
            return Err(Failure::Images(format!("{} is not a plain file", self.dir.join(name).display())));
        }
        let there = |name: &String, begun: &Begun| entries.iter().any(|(other, meta)| other == name && begun.is(meta));
        if let Some((name, _)) = self.begun.iter().find(|(name, begun)| !there(name, begun)) {
            let path = self.dir.join(name);
            return Err(Failure::Images(format!("{} was replaced while it was sent", path.display())));
        }
        self.ahead = self.bytes;
        for (name, meta) in entries {
            if !self.begun.contains_key(&name) {
                let file = File::open(path.join(&name)).map_err(io("open", &self.dir.join(&name)))?;
                self.begin(name.clone(), file, false)?;
            }
            self.send_to(&name, meta.len())?;
            if let Some(done) = self.begun.remove(&name) {
                self.mark(&Mark::FileEnd { number: done.number, bytes: done.sent })?;
            }
        }
        self.mark(&Mark::End { files: self.files, bytes: self.bytes })?;
        Ok(Sent { bytes: self.bytes, ahead: self.ahead, left: self.left, in_vain: self.in_vain })
    }

    fn begin(&mut self, name: String, file: File, used_up: bool) -> Result<(), Failure> {
        let number = self.files;
        self.files += 1;
        self.begun.insert(name.clone(), Begun { number, file, sent: 0, used_up });
        self.mark(&Mark::File { number, name })
    }

    /// Sends a file up to this length.
    fn send_to(&mut self, name: &str, length: u64) -> Result<(), Failure> {
        let Some(begun) = self.begun.get_mut(name) else { return Ok(()) };
        while begun.sent < length {
            let bytes = usize::try_from(length - begun.sent).unwrap_or(PIECE_BYTES).min(PIECE_BYTES);
            let mut front = [PIECE; PIECE_HEAD_BYTES];
            front[1..].copy_from_slice(&begun.number.to_le_bytes());
            let read = |room: &mut [u8]| begun.file.read_exact(room).map_err(io("read", &self.dir.join(name)));
            let sent = self.out.send_packed(&front, bytes, read, |leave| self.rate.wait(leave))?;
            self.left += sent.map_err(not_taken)? as u64;
            begun.sent += bytes as u64;
            begun.give_back(bytes);
            self.bytes += bytes as u64;
        }
        Ok(())
    }

    fn mark(&mut self, mark: &Mark) -> Result<(), Failure> {
        let bytes = to_bytes(mark).map_err(|e| Failure::Images(e.to_string()))?;
        let sent = self.out.send(1 + bytes.len(), |room| {
            room[0] = MARK;
            room[1..].copy_from_slice(&bytes);
            Ok::<(), Failure>(())
        })?;
        sent.map_err(not_taken)
    }
}

/// A file being written.
struct Open {
    file: File,
    path: PathBuf,
    bytes: u64,
}

impl Open {
    fn take(&mut self, part: Part<'_>) -> io::Result<()> {
        self.bytes += part.length() as u64;
        match part {
            Part::Bytes(bytes) => self.file.write_all(bytes),
            Part::Zeros(_) => self.file.seek(SeekFrom::Start(self.bytes)).map(|_| ()),
        }
    }
}

/// Writes what comes into a new directory.
struct Receiver<'a> {
    dir: &'a Path,
    open: BTreeMap<u32, Open>,
    written: Vec<PathBuf>,
    files: u32,
    bytes: u64,
    anew: u32,
}

/// Writes what comes into the new directory `dir` and checks it; the number of bytes.
pub(super) fn receive<R: Read>(dir: &Path, incoming: &mut Incoming<R>) -> Result<u64, Failure> {
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(e) if e.kind() == ErrorKind::AlreadyExists && is_empty_dir(dir) => {}
        made => made.map_err(io("make", dir))?,
    }
    let mut receiver = Receiver { dir, open: BTreeMap::new(), written: Vec::new(), files: 0, bytes: 0, anew: 0 };
    loop {
        let record = incoming.next().map_err(|e| match e.kind() {
            ErrorKind::UnexpectedEof => wrong("the transfer ended in the middle"),
            _ => Failure::Images(format!("the transfer broke off: {e}")),
        })?;
        match record.split_first() {
            Some((&PIECE, rest)) => receiver.piece(rest)?,
            Some((&MARK, rest)) => {
                let mark = from_bytes(rest).map_err(|e| Failure::Images(e.to_string()))?;
                if let Some(bytes) = receiver.mark(mark)? {
                    return Ok(bytes);
                }
            }
            _ => return Err(wrong("something came that is no piece of a file")),
        }
    }
}

fn wrong(what: &str) -> Failure {
    Failure::Images(what.to_string())
}

impl Receiver<'_> {
    fn piece(&mut self, piece: &[u8]) -> Result<(), Failure> {
        let (number, content) = piece.split_first_chunk().ok_or_else(|| wrong("a piece without a file"))?;
        let number = u32::from_le_bytes(*number);
        let to = self.open.get_mut(&number).ok_or_else(|| wrong("bytes came outside of a file"))?;
        for part in zeros::parts(content) {
            let part = part.map_err(|_| wrong("a piece came that is not whole"))?;
            self.bytes += part.length() as u64;
            if self.bytes > IMAGE_BYTES_MAX {
                return Err(Failure::Images(format!("more than {IMAGE_BYTES_MAX} bytes came, the limit")));
            }
            to.take(part).map_err(io("write", &to.path))?;
        }
        Ok(())
    }

    /// Takes a mark; the number of bytes, if it was the last one.
    fn mark(&mut self, mark: Mark) -> Result<Option<u64>, Failure> {
        match mark {
            Mark::File { number, name } => {
                if number != self.files || number >= IMAGE_FILES_MAX || self.open.len() >= OPEN_FILES_MAX {
                    let open = self.open.len();
                    return Err(Failure::Images(format!(
                        "file {number} is not the next, or over the limit ({open} open)"
                    )));
                }
                let open = create(self.dir, &name)?;
                self.files += 1;
                self.written.push(open.path.clone());
                self.open.insert(number, open);
            }
            Mark::FileEnd { number, bytes } => {
                let done = self.open.remove(&number).ok_or_else(|| wrong("a file ended that did not begin"))?;
                if done.bytes != bytes {
                    let (path, came) = (done.path.display(), done.bytes);
                    return Err(Failure::Images(format!("{came} bytes of {path} came, {bytes} were sent")));
                }
                // It may end with a hole.
                done.file.set_len(bytes).map_err(io("write", &done.path))?;
            }
            Mark::Anew => {
                self.anew += 1;
                if self.anew > ANEW_MAX {
                    return Err(Failure::Images(format!("begun anew more than {ANEW_MAX} times, the limit")));
                }
                self.open.clear();
                for path in self.written.drain(..) {
                    std::fs::remove_file(&path).map_err(io("remove", &path))?;
                }
                (self.files, self.bytes) = (0, 0);
            }
            Mark::End { files, bytes } => {
                let (own_files, own_bytes) = (self.files, self.bytes);
                if !self.open.is_empty() || (own_files, own_bytes) != (files, bytes) {
                    let text = format!("{own_files} files of {own_bytes} bytes came, {files} of {bytes} were sent");
                    return Err(Failure::Images(text));
                }
                return Ok(Some(bytes));
            }
        }
        Ok(None)
    }
}

fn is_empty_dir(dir: &Path) -> bool {
    let real = std::fs::symlink_metadata(dir).is_ok_and(|m| m.is_dir());
    real && std::fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_none())
}

/// A new file of a plain name.
fn create(dir: &Path, name: &str) -> Result<Open, Failure> {
    let plain =
        !name.is_empty() && name.len() <= NAME_BYTES_MAX && !name.contains(['/', '\0']) && name != "." && name != "..";
    if !plain {
        return Err(Failure::Images(format!("{name:?} is not a plain file name")));
    }
    let path = dir.join(name);
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path).map_err(io("make", &path))?;
    Ok(Open { file, path, bytes: 0 })
}

const _: () = assert!(PIECE_HEAD_BYTES + zeros::HEAD_BYTES + PIECE_BYTES <= CONTENT_BYTES_MAX);

#[cfg(test)]
mod tests {
    use super::super::bulk::Keys;
    use super::*;
    use std::io::Cursor;

    /// Bytes of the head of a record and of its tag.
    const AROUND: usize = 20;

    /// Two directories of this test alone, of which the second is still to be made.
    fn scratch(name: &str) -> (PathBuf, PathBuf, PathBuf) {
        let root = std::env::temp_dir().join(format!("pvmd-travel-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        std::fs::create_dir_all(root.join("from")).expect("a scratch directory");
        (root.clone(), root.join("from"), root.join("to"))
    }

    /// What is sent for a directory, and how many bytes of files that says it is.
    fn sent(from: &Path) -> (Vec<u8>, u64) {
        let progress = Progress::default();
        progress.turn(State::Complete);
        let (mut wire, rate) = (Vec::new(), Rate::default());
        let bytes =
            Sender::new(from, Outgoing::new(&mut wire, Keys::for_test(1).out), &rate).send(&progress).expect("sent");
        (wire, bytes.bytes)
    }

    fn received(to: &Path, wire: impl Read) -> Result<u64, Failure> {
        receive(to, &mut Incoming::new(wire, Keys::for_test(1).out))
    }

    /// The records of what was sent.
    fn records(mut wire: &[u8]) -> Vec<&[u8]> {
        let mut all = Vec::new();
        while let Some(head) = wire.first_chunk::<4>() {
            let (record, rest) = wire.split_at(u32::from_le_bytes(*head) as usize + AROUND);
            all.push(record);
            wire = rest;
        }
        all
    }

    /// Sends these marks and pieces, in good records.
    fn said(what: &[Result<Mark, (u32, usize)>]) -> Vec<u8> {
        let (mut wire, rate) = (Vec::new(), Rate::default());
        let mut sender = Sender::new(Path::new("/"), Outgoing::new(&mut wire, Keys::for_test(1).out), &rate);
        for one in what {
            match one {
                Ok(mark) => sender.mark(mark).expect("sent"),
                Err((number, bytes)) => {
                    let fill = |room: &mut [u8]| {
                        room.fill(7);
                        Ok::<(), Failure>(())
                    };
                    let front = [&[PIECE][..], &number.to_le_bytes()].concat();
                    sender.out.send_packed(&front, *bytes, fill, |_| ()).expect("filled").expect("sent");
                }
            }
        }
        drop(sender);
        wire
    }

    fn file(number: u32, name: &str) -> Result<Mark, (u32, usize)> {
        Ok(Mark::File { number, name: name.to_string() })
    }

    #[test]
    fn files_arrive_as_they_were_sent() {
        let (root, from, to) = scratch("whole");
        let big: Vec<u8> = (0..3 * PIECE_BYTES + 17).map(|i| (i % 251) as u8).collect();
        std::fs::write(from.join("pages-1.img"), &big).expect("writable");
        std::fs::write(from.join("empty.img"), "").expect("writable");
        let (wire, bytes) = sent(&from);
        assert_eq!((bytes, received(&to, &wire[..])), (big.len() as u64, Ok(bytes)));
        assert_eq!(std::fs::read(to.join("pages-1.img")).expect("there"), big);
        assert_eq!(std::fs::read(to.join("empty.img")).expect("there"), b"");
        std::fs::remove_dir_all(root).expect("ours");
    }

    #[test]
    fn zeros_are_neither_sent_nor_written_and_files_that_end_with_them_are_as_long_as_they_were() {
        let (root, from, to) = scratch("zeros");
        // Something at the begin, across the border of two pieces, and in front of an end in zeros.
        let mut big = vec![0; 8 * PIECE_BYTES + 12_345];
        big[..5000].fill(1);
        big[3 * PIECE_BYTES - 700..3 * PIECE_BYTES + 900].fill(2);
        big[8 * PIECE_BYTES..8 * PIECE_BYTES + 3].fill(3);
        let something = 5000 + 1600 + 3;
        let zeros = vec![0; 3 * PIECE_BYTES];
        std::fs::write(from.join("pages-1.img"), &big).expect("writable");
        std::fs::write(from.join("pages-2.img"), &zeros).expect("writable");
        let (wire, bytes) = sent(&from);
        assert!(wire.len() < something + 2048, "{} bytes left", wire.len());
        assert_eq!(received(&to, &wire[..]), Ok(bytes));
        assert_eq!(std::fs::read(to.join("pages-1.img")).expect("there"), big);
        assert_eq!(std::fs::read(to.join("pages-2.img")).expect("there"), zeros);
        let kept = |name: &str| std::fs::metadata(to.join(name)).expect("there").blocks() * 512;
        assert!(kept("pages-1.img") < PIECE_BYTES as u64 && kept("pages-2.img") == 0, "there are holes");
        std::fs::remove_dir_all(root).expect("ours");
    }

    #[test]
    fn what_really_leaves_is_charged_to_the_rate() {
        let (root, from, _) = scratch("charged");
        std::fs::write(from.join("pages-1.img"), vec![0; 64 * PIECE_BYTES]).expect("writable");
        std::fs::write(from.join("pages-2.img"), vec![7; PIECE_BYTES]).expect("writable");
        let progress = Progress::default();
        progress.turn(State::Complete);
        let rate = Rate::of(Some("1000000")).expect("a rate");
        let sender = Sender::new(&from, Outgoing::new(io::sink(), Keys::for_test(1).out), &rate);
        let begin = std::time::Instant::now();
        let sent = sender.send(&progress).expect("sent");
        // 16 MiB at this rate would take 16 s.
        assert!(begin.elapsed() < Duration::from_secs(12), "zeros were waited for");
        let around = 64 * 64;
        assert!((PIECE_BYTES..PIECE_BYTES + around).contains(&(sent.left as usize)), "{sent:?}");
        std::fs::remove_dir_all(root).expect("ours");
    }

    #[test]
    fn records_cannot_be_changed_left_out_exchanged_or_repeated_and_the_end_cannot_be_cut_off() {
        let (root, from, to) = scratch("tampered");
        std::fs::write(from.join("core.img"), [5; 1000]).expect("writable");
        let (wire, _) = sent(&from);
        let all = records(&wire);
        assert_eq!(all.len(), 4, "a file begins, a piece, the file ends, the end");
        let mut ways: Vec<Vec<usize>> = (0..all.len()).map(|cut| (0..cut).collect()).collect();
        ways.extend([vec![0, 2, 3], vec![0, 1, 1, 2, 3], vec![1, 0, 2, 3], vec![0, 1, 3, 2], vec![3]]);
        for order in ways {
            let changed = order.iter().map(|at| all[*at]).collect::<Vec<_>>().concat();
            let result = received(&to, &changed[..]);
            assert!(matches!(result, Err(Failure::Images(_))), "{order:?}: {result:?}");
            std::fs::remove_dir_all(&to).expect("ours");
        }
        for at in 0..wire.len() {
            let mut changed = wire.clone();
            changed[at] ^= 4;
            let result = received(&to, &changed[..]);
            assert!(matches!(result, Err(Failure::Images(_))), "byte {at}: {result:?}");
            std::fs::remove_dir_all(&to).expect("ours");
        }
        for bytes in 0..wire.len() {
            assert!(received(&to, &wire[..bytes]).is_err(), "cut after {bytes} bytes");
            std::fs::remove_dir_all(&to).expect("ours");
        }
        std::fs::remove_dir_all(root).expect("ours");
    }

    #[test]
    fn a_source_that_has_the_keys_and_does_not_keep_to_the_rules_gets_an_error() {
        let (root, _, to) = scratch("rules");
        let end = |files, bytes| Ok(Mark::End { files, bytes });
        let ends = |number, bytes| Ok(Mark::FileEnd { number, bytes });
        let mut rules: Vec<Vec<Result<Mark, (u32, usize)>>> = vec![
            vec![Err((0, 5))],
            vec![file(1, "a.img")],
            vec![file(0, "a.img"), file(0, "b.img")],
            vec![file(0, "a.img"), file(1, "a.img")],
            vec![file(0, "a.img"), Err((1, 5))],
            vec![file(0, "a.img"), Err((0, 5)), ends(0, 4)],
            vec![file(0, "a.img"), Err((0, 5)), ends(0, 6)],
            vec![file(0, "a.img"), ends(0, 0), Err((0, 5))],
            vec![ends(0, 0)],
            vec![end(1, 0)],
            vec![file(0, "a.img"), end(1, 0)],
            vec![file(0, "a.img"), Err((0, 5)), ends(0, 5), end(1, 4)],
            vec![file(0, "a.img"), Ok(Mark::Anew), Err((0, 5))],
            (0..=ANEW_MAX).map(|_| Ok(Mark::Anew)).collect(),
            (0..=OPEN_FILES_MAX as u32).map(|number| file(number, &format!("{number}.img"))).collect(),
        ];
        let names = ["", ".", "..", "../x", "a/b", "/etc/x", &"n".repeat(256)];
        rules.extend(names.map(|name| vec![file(0, name)]));
        for what in rules {
            let mut wire = said(&what);
            // What follows is cut off: nothing of that may have been waited for.
            wire.push(0);
            let result = received(&to, &wire[..]);
            let middle = result == Err(wrong("the transfer ended in the middle"));
            assert!(matches!(result, Err(Failure::Images(_) | Failure::Io(_))) && !middle, "{what:?}: {result:?}");
            let _ = std::fs::remove_dir_all(&to);
        }
        std::fs::remove_dir_all(root).expect("ours");
    }

    #[test]
    fn a_record_that_announces_too_much_is_refused_before_it_comes() {
        let (root, _, to) = scratch("announced");
        let result = received(&to, &u32::MAX.to_le_bytes()[..]);
        assert!(matches!(&result, Err(Failure::Images(why)) if why.contains("impossible length")), "{result:?}");
        std::fs::remove_dir_all(root).expect("ours");
    }

    /// Holds what was written, for whoever looks meanwhile.
    #[derive(Clone, Default)]
    struct Wire(std::sync::Arc<Mutex<Vec<u8>>>);

    impl Write for Wire {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("no panic").extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Waits until so much was sent.
    fn until(wire: &Wire, bytes: usize) {
        let begin = std::time::Instant::now();
        while wire.0.lock().expect("no panic").len() < bytes {
            assert!(begin.elapsed() < Duration::from_secs(30), "what grows is not sent");
            std::thread::sleep(LOOK_EVERY);
        }
    }

    #[test]
    fn what_grows_is_sent_before_it_is_complete_and_a_directory_begun_anew_arrives_as_it_is_in_the_end() {
        let content: Vec<u8> = (0..2 * PIECE_BYTES + 100).map(|i| (i % 241) as u8).collect();
        // A directory that is begun anew may have more files, and all of that may be sent while it is written.
        for (anew, more) in [(false, 0), (true, 5), (true, content.len())] {
            let (root, from, to) = scratch(&format!("grows-{anew}-{more}"));
            let (progress, wire, rate) = (Progress::default(), Wire::default(), Rate::default());
            let result = std::thread::scope(|scope| {
                let (out, from, of_thread, rate) = (wire.clone(), &from, &progress, &rate);
                let sending = scope
                    .spawn(move || Sender::new(from, Outgoing::new(out, Keys::for_test(1).out), rate).send(of_thread));
                let path = from.join("pages-1.img");
                let mut growing = File::create(&path).expect("writable");
                growing.write_all(&content[..PIECE_BYTES + 5]).expect("writable");
                until(&wire, PIECE_BYTES);
                if anew {
                    std::fs::remove_dir_all(from).expect("ours");
                    std::fs::create_dir(from).expect("a scratch directory");
                    std::fs::write(&path, b"other").expect("writable");
                    std::fs::write(from.join("pages-2.img"), &content[..more]).expect("writable");
                    until(&wire, PIECE_BYTES + more);
                } else {
                    growing.write_all(&content[PIECE_BYTES + 5..]).expect("writable");
                }
                std::fs::write(from.join("core-1.img"), b"core").expect("writable");
                progress.turn(State::Complete);
                sending.join().expect("no panic")
            });
            let expected = if anew { b"other" } else { &content[..] };
            let bytes = (expected.len() + more + 4) as u64;
            let wire = wire.0.lock().expect("no panic").clone();
            let ahead = if anew { more - more % PIECE_BYTES } else { PIECE_BYTES } as u64;
            let sent = result.expect("sent");
            assert_eq!((sent.bytes, received(&to, Cursor::new(wire))), (bytes, Ok(bytes)));
            let in_vain = if anew { PIECE_BYTES as u64 } else { 0 };
            assert!(sent.ahead >= ahead && sent.in_vain == in_vain, "{sent:?}");
            assert_eq!(std::fs::read(to.join("pages-1.img")).expect("there"), expected);
            assert_eq!(std::fs::read(to.join("core-1.img")).expect("there"), b"core");
            if anew {
                assert!(std::fs::read(to.join("pages-2.img")).expect("there") == content[..more], "it is as it was");
            }
            assert_eq!(std::fs::read_dir(&to).expect("there").count(), 2 + usize::from(anew));
            std::fs::remove_dir_all(root).expect("ours");
        }
    }

    #[test]
    fn a_file_that_was_sent_in_part_and_is_replaced_is_not_sent_as_if_it_were_whole() {
        let (root, from, _) = scratch("replaced");
        let (progress, wire) = (Progress::default(), Wire::default());
        let result = std::thread::scope(|scope| {
            let (out, from, of_thread) = (wire.clone(), &from, &progress);
            let sending = scope.spawn(move || {
                let rate = Rate::default();
                Sender::new(from, Outgoing::new(out, Keys::for_test(1).out), &rate).send(of_thread)
            });
            let path = from.join("pages-1.img");
            std::fs::write(&path, vec![7; PIECE_BYTES]).expect("writable");
            until(&wire, PIECE_BYTES);
            std::fs::remove_file(&path).expect("ours");
            std::fs::write(&path, vec![7; PIECE_BYTES]).expect("writable");
            progress.turn(State::Complete);
            sending.join().expect("no panic")
        });
        assert!(matches!(&result, Err(Failure::Images(why)) if why.contains("pages-1.img was replaced")), "{result:?}");
        std::fs::remove_dir_all(root).expect("ours");
    }

    /// Cuts a file when something was sent of it.
    struct Cuts<'a> {
        wire: Wire,
        path: &'a Path,
    }

    impl Write for Cuts<'_> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if bytes.len() > PIECE_BYTES {
                OpenOptions::new().write(true).open(self.path)?.set_len(7)?;
            }
            self.wire.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn what_grows_and_cannot_be_read_is_told_when_it_is_said_to_be_complete_and_not_before() {
        for (state, told) in [(State::Complete, "pages-1.img"), (State::Void, "broken off")] {
            let (root, from, _) = scratch(&format!("unread-{state:?}"));
            let (progress, wire, path) = (Progress::default(), Wire::default(), from.join("pages-1.img"));
            std::fs::write(&path, vec![7; 2 * PIECE_BYTES]).expect("writable");
            let result = std::thread::scope(|scope| {
                let (out, from, of_thread) = (Cuts { wire: wire.clone(), path: &path }, &from, &progress);
                let sending = scope.spawn(move || {
                    let rate = Rate::default();
                    Sender::new(from, Outgoing::new(out, Keys::for_test(1).out), &rate).send(of_thread)
                });
                until(&wire, PIECE_BYTES);
                progress.turn(state);
                sending.join().expect("no panic")
            });
            let why = result.expect_err("it is not whole").to_string();
            assert!(why.contains(told), "{why}");
            std::fs::remove_dir_all(root).expect("ours");
        }
    }

    #[test]
    fn a_directory_that_nobody_wants_any_more_is_sent_no_further() {
        let (root, from, _) = scratch("void");
        let progress = Progress::default();
        progress.turn(State::Void);
        progress.turn(State::Complete);
        let result =
            Sender::new(&from, Outgoing::new(io::sink(), Keys::for_test(1).out), &Rate::default()).send(&progress);
        assert!(matches!(result, Err(Failure::CalledOff(_))), "{result:?}");
        std::fs::remove_dir_all(root).expect("ours");
    }
}
