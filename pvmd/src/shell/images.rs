//! Checkpoint images from daemon to daemon: one stream of a session for each move, every file with its name, length and
//! BLAKE3 hash, and an end mark with the counts. Reading, hashing and writing happen on threads of their own, so that
//! the daemon's loop never waits for a disk.

use super::input::{Input, Inputs};
use super::log::Log;
use super::net::Net;
use super::place::remove_any;
use super::session::{image_stream, read_frame};
use crate::machine::io::Event;
use bytes::{Bytes, BytesMut};
use quinn::{RecvStream, VarInt};
use sempa_proto::frame::{Frame, FrameDecoder, FrameKind, encode, encode_control};
use sempa_proto::migration::Failure;
use sempa_proto::place::Place;
use sempa_proto::{HostId, MigrationId};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::sleep;

/// Bytes of a file in one frame at most.
const CHUNK_BYTES: usize = 1 << 20;
/// Frames between the stream and the disk.
const FRAMES_WAITING_MAX: usize = 8;
/// Files of one move at most.
const IMAGE_FILES_MAX: u32 = 65_536;
/// Bytes of one move at most.
const IMAGE_BYTES_MAX: u64 = 1 << 42;
/// Bytes of a file name at most (NAME_MAX).
const NAME_BYTES_MAX: usize = 255;
/// Code with which a stream is refused or broken off.
const STREAM_REFUSED: VarInt = VarInt::from_u32(1);
/// Time for the target's own reason to be acted upon before the source is told to stop.
const REFUSE_AFTER: Duration = Duration::from_secs(2);

/// The control frames of a transfer; [`FrameKind::Image`] frames with a file's bytes stand between `File` and `FileEnd`.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Mark {
    /// A file begins.
    File { name: String, bytes: u64 },
    /// It has ended.
    FileEnd { blake3: [u8; 32] },
    /// All files have been sent.
    End { files: u32, bytes: u64 },
}

/// A transfer under way.
#[derive(Debug)]
struct Transfer {
    /// None for what is done on this host alone.
    stream: Option<AbortHandle>,
    /// Reads or writes the files; ends soon after the stream.
    disk: JoinHandle<()>,
}

/// All transfers of this host. Owned by the daemon's loop.
pub(crate) struct Images {
    place: Place,
    inputs: Inputs,
    log: Log,
    expected: HashMap<MigrationId, HostId>,
    transfers: HashMap<MigrationId, Transfer>,
}

impl Images {
    /// No transfers, in this place.
    pub(crate) fn new(place: Place, inputs: Inputs, log: Log) -> Images {
        Images { place, inputs, log, expected: HashMap::new(), transfers: HashMap::new() }
    }

    /// Sends the images of a move; [`Event::ImagesSent`] tells the end.
    pub(crate) fn send(&mut self, migration: MigrationId, to: HostId, net: &Net) {
        self.complete_and_send(migration, to, net, |_| Ok(()));
    }

    /// As [`Images::send`], when `complete` has put the last of them into the directory.
    pub(crate) fn complete_and_send(
        &mut self,
        migration: MigrationId,
        to: HostId,
        net: &Net,
        complete: impl FnOnce(&Path) -> Result<(), Failure> + Send + 'static,
    ) {
        let dir = self.place.images(migration);
        let (frames, queue) = mpsc::channel(FRAMES_WAITING_MAX);
        let (tell, told) = oneshot::channel();
        let disk = tokio::task::spawn_blocking(move || {
            let _ = tell.send(complete(&dir).and_then(|()| read_files(&dir, &frames)));
        });
        let bulk = net.bulk(to);
        let (inputs, log) = (self.inputs.clone(), self.log.clone());
        let stream = tokio::spawn(async move {
            let result = match bulk {
                None => Err(Failure::HostLost(to)),
                Some((pair, connection)) => {
                    let (begin, before) = (Instant::now(), connection.stats().path);
                    let result = match image_stream(&pair, &connection, migration).await {
                        Ok(stream) => send_frames(stream, queue, told).await,
                        Err(why) => Err(Failure::Images(format!("{to}: {why}"))),
                    };
                    if let Ok(bytes) = &result {
                        let path = connection.stats().path;
                        log.line(format!(
                            "{migration}: {bytes} bytes of images sent to {to} in {} ms (round trip {:.1} ms, {} packets lost)",
                            begin.elapsed().as_millis(),
                            path.rtt.as_secs_f64() * 1e3,
                            path.lost_packets - before.lost_packets
                        ));
                    }
                    result
                }
            };
            let _ = inputs.send(Input::Event(Event::ImagesSent { migration, result })).await;
        });
        self.transfers.insert(migration, Transfer { stream: Some(stream.abort_handle()), disk });
    }

    /// What is done by `complete` needs no way to another host: [`Event::ImagesReceived`] tells the end.
    pub(crate) fn complete_here(
        &mut self,
        migration: MigrationId,
        complete: impl FnOnce(&Path) -> Result<(), Failure> + Send + 'static,
    ) {
        let (dir, inputs) = (self.place.images(migration), self.inputs.clone());
        let disk = tokio::task::spawn_blocking(move || {
            let result = complete(&dir).map(|()| 0);
            let _ = inputs.blocking_send(Input::Event(Event::ImagesReceived { migration, result }));
        });
        self.transfers.insert(migration, Transfer { stream: None, disk });
    }

    /// From now on the images of this move are taken from this host.
    pub(crate) fn expect(&mut self, migration: MigrationId, from: HostId) {
        self.expected.insert(migration, from);
    }

    /// Takes a stream of images if it is expected; [`Event::ImagesReceived`] tells the end.
    pub(crate) fn arrived(
        &mut self,
        from: HostId,
        migration: MigrationId,
        mut stream: RecvStream,
        decoder: FrameDecoder,
    ) {
        if self.expected.get(&migration) != Some(&from) {
            self.log.line(format!("refused images of {migration} from {from}: nobody expects them"));
            let _ = stream.stop(STREAM_REFUSED);
            return;
        }
        self.expected.remove(&migration);
        let dir = self.place.images(migration);
        let (frames, queue) = mpsc::channel(FRAMES_WAITING_MAX);
        let (tell, told) = oneshot::channel();
        let disk = tokio::task::spawn_blocking(move || {
            let _ = tell.send(write_files(&dir, queue));
        });
        let inputs = self.inputs.clone();
        let task = tokio::spawn(async move {
            let broken = receive_frames(&mut stream, decoder, frames).await;
            let written = told.await.unwrap_or_else(|_| Err(Failure::Images("the writing thread ended".into())));
            let result = match (written, broken) {
                (Ok(bytes), _) => Ok(bytes),
                // The writer only knows that nothing more came; the stream knows why.
                (Err(Failure::Images(_)), Some(why)) => Err(Failure::Images(format!("from {from}: {why}"))),
                (Err(failure), _) => Err(failure),
            };
            let failed = result.is_err();
            let _ = inputs.send(Input::Event(Event::ImagesReceived { migration, result })).await;
            if failed {
                // The source would report that it could not go on; why not is known here, and has to be heard first. What
                // is done about it drops this transfer, and its stream with it.
                sleep(REFUSE_AFTER).await;
                let _ = stream.stop(STREAM_REFUSED);
            }
        });
        self.transfers.insert(migration, Transfer { stream: Some(task.abort_handle()), disk });
    }

    /// Breaks off what is under way and removes the images.
    pub(crate) fn drop_images(&mut self, migration: MigrationId) {
        self.expected.remove(&migration);
        let transfer = self.transfers.remove(&migration);
        let dir = self.place.images(migration);
        tokio::spawn(async move {
            if let Some(Transfer { stream, disk }) = transfer {
                if let Some(stream) = stream {
                    stream.abort();
                }
                // It notices at its next chunk that the stream has gone.
                let _ = disk.await;
            }
            let _ = tokio::task::spawn_blocking(move || remove_any(&dir)).await;
        });
    }
}

/// Puts frames on the stream until the reading thread is done, and waits until the other host has them all.
async fn send_frames(
    mut stream: quinn::SendStream,
    mut queue: mpsc::Receiver<Bytes>,
    told: oneshot::Receiver<Result<u64, Failure>>,
) -> Result<u64, Failure> {
    while let Some(frame) = queue.recv().await {
        stream.write_chunk(frame).await.map_err(|e| Failure::Images(format!("the target took no more: {e}")))?;
    }
    let result = told.await.unwrap_or_else(|_| Err(Failure::Images("the reading thread ended".into())));
    if result.is_err() {
        let _ = stream.reset(STREAM_REFUSED);
        return result;
    }
    let _ = stream.finish();
    match stream.stopped().await {
        Ok(None) => result,
        Ok(Some(_)) => Err(Failure::Images("the target refused them".into())),
        Err(e) => Err(Failure::Images(format!("the session broke: {e}"))),
    }
}

/// Hands frames to the writing thread; why the stream ended, if not by itself.
async fn receive_frames(
    stream: &mut RecvStream,
    mut decoder: FrameDecoder,
    frames: mpsc::Sender<Frame>,
) -> Option<String> {
    loop {
        match read_frame(stream, &mut decoder).await {
            Ok(Some(frame)) => {
                if frames.send(frame).await.is_err() {
                    // The writer has found something wrong, or everything that was to come.
                    return None;
                }
            }
            Ok(None) => return None,
            Err(why) => return Some(why),
        }
    }
}

fn io(act: &str, path: &Path) -> impl FnOnce(std::io::Error) -> Failure {
    let what = format!("{act} {}", path.display());
    move |e| Failure::Io(format!("{what}: {e}"))
}

/// Reads all files of `dir` into frames; the number of bytes.
fn read_files(dir: &Path, frames: &mpsc::Sender<Bytes>) -> Result<u64, Failure> {
    let mut paths: Vec<PathBuf> = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(io("read", dir))? {
        paths.push(entry.map_err(io("read", dir))?.path());
    }
    paths.sort();
    let mark = |mark: &Mark| {
        let frame = encode_control(mark).map_err(|e| Failure::Images(e.to_string()))?;
        put(frames, frame)
    };
    let mut total = 0;
    for path in &paths {
        let meta = std::fs::symlink_metadata(path).map_err(io("read", path))?;
        let name = path.file_name().and_then(|n| n.to_str()).filter(|_| meta.is_file());
        let name = name.ok_or_else(|| Failure::Images(format!("{} is not a plain file", path.display())))?;
        mark(&Mark::File { name: name.to_string(), bytes: meta.len() })?;
        let mut file = File::open(path).map_err(io("open", path))?;
        let mut hasher = blake3::Hasher::new();
        let mut left = meta.len();
        while left > 0 {
            let len = CHUNK_BYTES.min(usize::try_from(left).unwrap_or(CHUNK_BYTES));
            let head = encode(FrameKind::Image, &[]);
            let mut frame = BytesMut::zeroed(head.len() + len);
            let length = u32::try_from(len + 1).expect("a chunk is far below 4 GiB");
            frame[..head.len()].copy_from_slice(&head);
            frame[..4].copy_from_slice(&length.to_le_bytes());
            file.read_exact(&mut frame[head.len()..]).map_err(io("read", path))?;
            hasher.update(&frame[head.len()..]);
            put(frames, frame.freeze())?;
            left -= len as u64;
        }
        mark(&Mark::FileEnd { blake3: *hasher.finalize().as_bytes() })?;
        total += meta.len();
    }
    let files = u32::try_from(paths.len()).map_err(|_| Failure::Images("too many files".into()))?;
    mark(&Mark::End { files, bytes: total })?;
    Ok(total)
}

fn put(frames: &mpsc::Sender<Bytes>, frame: Bytes) -> Result<(), Failure> {
    frames.blocking_send(frame).map_err(|_| Failure::CalledOff("the transfer was broken off".into()))
}

/// A file being written.
struct Open {
    file: File,
    path: PathBuf,
    left: u64,
    hasher: blake3::Hasher,
}

/// Writes what comes into the new directory `dir` and checks it; the number of bytes.
fn write_files(dir: &Path, mut frames: mpsc::Receiver<Frame>) -> Result<u64, Failure> {
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(e) if e.kind() == ErrorKind::AlreadyExists && is_empty_dir(dir) => {}
        made => made.map_err(io("make", dir))?,
    }
    let (mut files, mut bytes) = (0u32, 0u64);
    let mut open: Option<Open> = None;
    let wrong = |what: String| Failure::Images(what);
    while let Some(frame) = frames.blocking_recv() {
        if frame.kind == FrameKind::Image {
            let Some(to) = &mut open else { return Err(wrong("bytes came outside of a file".into())) };
            let len = frame.body.len() as u64;
            to.left = to.left.checked_sub(len).ok_or_else(|| wrong("a file is longer than announced".into()))?;
            to.hasher.update(&frame.body);
            to.file.write_all(&frame.body).map_err(io("write", &to.path))?;
            continue;
        }
        match frame.control::<Mark>().map_err(|e| wrong(e.to_string()))? {
            Mark::File { name, bytes: len } => {
                files += 1;
                bytes = bytes.saturating_add(len);
                if open.is_some() || files > IMAGE_FILES_MAX || bytes > IMAGE_BYTES_MAX {
                    return Err(wrong(format!("{files} files of {bytes} bytes are over the limit, or overlap")));
                }
                open = Some(create(dir, &name, len)?);
            }
            Mark::FileEnd { blake3 } => {
                let done = open.take().ok_or_else(|| wrong("a file ended that did not begin".into()))?;
                if done.left != 0 || *done.hasher.finalize().as_bytes() != blake3 {
                    return Err(wrong(format!("{} did not arrive as it was sent", done.path.display())));
                }
            }
            Mark::End { files: all_files, bytes: all_bytes } => {
                if open.is_some() || (files, bytes) != (all_files, all_bytes) {
                    return Err(wrong(format!(
                        "{files} files of {bytes} bytes came, {all_files} of {all_bytes} were sent"
                    )));
                }
                return Ok(bytes);
            }
        }
    }
    Err(wrong("the transfer ended in the middle".into()))
}

fn is_empty_dir(dir: &Path) -> bool {
    let real = std::fs::symlink_metadata(dir).is_ok_and(|m| m.is_dir());
    real && std::fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_none())
}

/// A new file of a plain name.
fn create(dir: &Path, name: &str, bytes: u64) -> Result<Open, Failure> {
    let plain =
        !name.is_empty() && name.len() <= NAME_BYTES_MAX && !name.contains(['/', '\0']) && name != "." && name != "..";
    if !plain {
        return Err(Failure::Images(format!("{name:?} is not a plain file name")));
    }
    let path = dir.join(name);
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path).map_err(io("make", &path))?;
    Ok(Open { file, path, left: bytes, hasher: blake3::Hasher::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two directories of this test alone.
    fn scratch(name: &str) -> (PathBuf, PathBuf) {
        let root = std::env::temp_dir().join(format!("pvmd-images-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        std::fs::create_dir_all(root.join("from")).expect("a scratch directory");
        (root.clone(), root.join("to"))
    }

    /// Runs sender and receiver against each other; `tamper` may change the frames on their way.
    fn transfer(root: &Path, to: &Path, tamper: impl Fn(usize, Frame) -> Option<Frame>) -> Result<u64, Failure> {
        let (frames, mut queue) = mpsc::channel(1 << 16);
        let sent = read_files(&root.join("from"), &frames);
        drop(frames);
        let mut decoder = FrameDecoder::new();
        let (forward, arrive) = mpsc::channel(1 << 16);
        let mut n = 0;
        while let Some(bytes) = queue.blocking_recv() {
            decoder.push(&bytes);
            while let Some(frame) = decoder.next_frame().expect("good frames") {
                if let Some(frame) = tamper(n, frame) {
                    forward.blocking_send(frame).expect("room");
                }
                n += 1;
            }
        }
        drop(forward);
        let received = write_files(to, arrive)?;
        assert_eq!(sent, Ok(received));
        Ok(received)
    }

    #[test]
    fn files_arrive_as_they_were_sent() {
        let (root, to) = scratch("whole");
        let big: Vec<u8> = (0..3 * CHUNK_BYTES + 17).map(|i| (i % 251) as u8).collect();
        std::fs::write(root.join("from/pages-1.img"), &big).expect("writable");
        std::fs::write(root.join("from/empty.img"), "").expect("writable");
        assert_eq!(transfer(&root, &to, |_, f| Some(f)), Ok(big.len() as u64));
        assert_eq!(std::fs::read(to.join("pages-1.img")).expect("there"), big);
        assert_eq!(std::fs::read(to.join("empty.img")).expect("there"), b"");
        std::fs::remove_dir_all(root).expect("ours");
    }

    #[test]
    fn a_changed_or_missing_piece_is_noticed() {
        for (name, which) in [("changed", 1), ("cut", 2), ("end", 3)] {
            let (root, to) = scratch(name);
            std::fs::write(root.join("from/core.img"), [5; 1000]).expect("writable");
            let result = transfer(&root, &to, |n, mut frame| {
                if n != which {
                    return Some(frame);
                }
                frame.body = Bytes::from_static(&[6; 1000]);
                (frame.kind == FrameKind::Image).then_some(frame)
            });
            assert!(matches!(result, Err(Failure::Images(_))), "{name}: {result:?}");
            std::fs::remove_dir_all(root).expect("ours");
        }
    }

    #[test]
    fn only_plain_names_are_written() {
        let (root, to) = scratch("names");
        std::fs::create_dir(&to).expect("writable");
        for name in ["", ".", "..", "../x", "a/b", "/etc/x", &"n".repeat(256)] {
            assert!(create(&to, name, 1).is_err(), "{name}");
        }
        std::fs::remove_dir_all(root).expect("ours");
    }
}
