//! Memory of rings and doorbells: memory files that two processes map. The files are sealed, so
//! neither process can shrink a file while the other uses it.
#![allow(unsafe_code)] // Mapping memory, and copying from and to memory that another process may change meanwhile.

use crate::doorbell::Doorbell;
use crate::futex;
use crate::ring::{RECORD_ALIGNMENT, RingControl, RingMemory, RingReader, RingWriter};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::ftruncate;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Size in bytes of the data area of one ring. The largest record must fit in a quarter of the data
/// area, so that reader and writer can work at the same time.
pub const RING_BYTES: usize = 512 << 10;
/// Size in bytes of the area before the data. The area contains the control words of both rings.
const CONTROL_BYTES: usize = 4096;
/// Size in bytes of the memory with the two rings of a pair of tasks.
pub const RING_PAIR_BYTES: usize = CONTROL_BYTES + 2 * RING_BYTES;
/// Size of a doorbell's memory.
pub const DOORBELL_BYTES: usize = 4096;

const _: () = assert!(
    2 * size_of::<RingControl>() <= CONTROL_BYTES && size_of::<Doorbell>() <= DOORBELL_BYTES
);
const _: () = assert!(RING_BYTES.is_power_of_two());
const _: () = assert!(CONTROL_BYTES.is_multiple_of(RECORD_ALIGNMENT));

/// Creates a memory file of this size; the caller must seal the file.
///
/// # Errors
/// No descriptors or no memory are available, or the file size limit of the process is too small: a
/// write beyond the limit would end the process with SIGXFSZ.
pub(crate) fn create_memfd(name: &std::ffi::CStr, bytes: usize) -> io::Result<OwnedFd> {
    let (size_max, _) = getrlimit(Resource::RLIMIT_FSIZE)?;
    if size_max < bytes as u64 {
        return Err(io::Error::from(io::ErrorKind::FileTooLarge));
    }
    let fd = memfd_create(name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
    ftruncate(&fd, i64::try_from(bytes).expect("small"))?;
    Ok(fd)
}

/// Creates a memory file that both processes may write but cannot resize.
fn create_sealed_memfd(name: &std::ffi::CStr, bytes: usize) -> io::Result<OwnedFd> {
    let fd = create_memfd(name, bytes)?;
    fcntl(&fd, FcntlArg::F_ADD_SEALS(required_seals()))?;
    Ok(fd)
}

fn required_seals() -> SealFlag {
    SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL
}

/// Checks that a descriptor from another task is a memory file of this size with these seals. An
/// access beyond the end of a smaller file would kill this process.
pub(crate) fn verify_memfd(fd: BorrowedFd<'_>, bytes: usize, seals: SealFlag) -> io::Result<()> {
    let invalid_fd_error = |problem: &str| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("invalid descriptor for shared memory: {problem}"),
        )
    };
    let seal_bits = fcntl(fd, FcntlArg::F_GET_SEALS).map_err(|_| invalid_fd_error("is none"))?;
    if !SealFlag::from_bits_truncate(seal_bits).contains(seals) {
        return Err(invalid_fd_error("is not sealed"));
    }
    let size = nix::sys::stat::fstat(fd)?.st_size;
    if usize::try_from(size) != Ok(bytes) {
        return Err(invalid_fd_error(&format!(
            "has {size} bytes instead of {bytes}"
        )));
    }
    Ok(())
}

/// Mapped memory; it is unmapped when the value is dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    size_bytes: usize,
}

// SAFETY: the memory belongs to no thread; all access uses atomics or copies through raw pointers.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`: all access uses atomics or copies through raw pointers.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps a memory file, or private memory of this process if `fd` is `None`. A forked child does
    /// not inherit the mapping.
    pub(crate) fn new(fd: Option<BorrowedFd<'_>>, bytes: usize) -> io::Result<Self> {
        let (flags, raw_fd) = match fd {
            Some(fd) => (libc::MAP_SHARED, fd.as_raw_fd()),
            None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
        };
        let mapping = Self::map(bytes, libc::PROT_READ | libc::PROT_WRITE, flags, raw_fd)?;
        // SAFETY: the range is the mapping just made.
        if unsafe { libc::madvise(mapping.start().cast(), bytes, libc::MADV_DONTFORK) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(mapping)
    }

    /// Maps a memory file for reading. A forked child inherits the mapping.
    pub(crate) fn map_read_only(fd: BorrowedFd<'_>, bytes: usize) -> io::Result<Self> {
        Self::map(bytes, libc::PROT_READ, libc::MAP_SHARED, fd.as_raw_fd())
    }

    /// Maps private memory of which only a small part will be used. A forked child inherits the
    /// mapping.
    pub(crate) fn map_private_sparse(bytes: usize) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        Self::map(bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1)
    }

    fn map(bytes: usize, protection: i32, flags: i32, raw_fd: i32) -> io::Result<Self> {
        // SAFETY: a fresh mapping at an address of the kernel's choice touches nothing that exists.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, raw_fd, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).expect("the kernel maps nothing at 0 unless asked");
        Ok(Self {
            start,
            size_bytes: bytes,
        })
    }

    #[inline]
    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

/// Replaces the mapping `old_mapping` atomically by `new_mapping`, which has the same size. Threads
/// that use the address must tolerate the new content.
pub(crate) fn replace(old_mapping: &Mapping, new_mapping: Mapping) -> io::Result<()> {
    assert_eq!(
        old_mapping.size_bytes, new_mapping.size_bytes,
        "one takes the whole place of the other"
    );
    let new_mapping = std::mem::ManuallyDrop::new(new_mapping);
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    let (source, target): (*mut libc::c_void, *mut libc::c_void) =
        (new_mapping.start().cast(), old_mapping.start().cast());
    // SAFETY: both ranges are mappings of this size made by `Mapping`. The old mapping is replaced
    // in one step by memory that is valid for all users of the old mapping. No other code uses the
    // new mapping.
    let new_address: *mut libc::c_void = unsafe {
        libc::mremap(
            source,
            old_mapping.size_bytes,
            old_mapping.size_bytes,
            flags,
            target,
        )
    };
    if new_address == libc::MAP_FAILED {
        let error = io::Error::last_os_error();
        drop(std::mem::ManuallyDrop::into_inner(new_mapping));
        return Err(error);
    }
    Ok(())
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `map`, and no pointer into the range is left.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.size_bytes) };
    }
}

/// One of the two rings in the memory of a pair of tasks.
#[derive(Clone, Debug)]
pub struct SharedRing {
    mapping: Arc<Mapping>,
    control_offset: usize,
    data_offset: usize,
}

impl SharedRing {
    #[inline]
    fn data_pointer(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset <= RING_BYTES && len <= RING_BYTES - offset,
            "ranges end within the ring"
        );
        // SAFETY: the offset was just checked, and the constants keep the data within the mapping.
        unsafe { self.mapping.start.as_ptr().add(self.data_offset + offset) }
    }
}

impl SharedRing {
    /// Returns the word at an offset that is a multiple of eight.
    #[inline]
    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(
            offset.is_multiple_of(align_of::<AtomicU64>()),
            "an aligned word"
        );
        // SAFETY: the word is in the mapping and aligned, because the data area is, and any bytes
        // are valid for an atomic. While the word is the header of a record, both processes access
        // it by atomic operations only.
        unsafe { &*self.data_pointer(offset, size_of::<AtomicU64>()).cast() }
    }
}

impl RingMemory for SharedRing {
    #[inline]
    fn control(&self) -> &RingControl {
        // SAFETY: the words lie at the start of the mapping, aligned, and are atomics for which any
        // bytes are valid.
        unsafe {
            &*self
                .mapping
                .start
                .as_ptr()
                .add(self.control_offset)
                .cast::<RingControl>()
        }
    }

    #[inline]
    fn capacity(&self) -> usize {
        RING_BYTES
    }

    #[inline]
    fn load_header(&self, offset: usize) -> u64 {
        self.word(offset).load(Ordering::Acquire)
    }

    #[inline]
    fn store_header(&self, offset: usize, word: u64, ordering: Ordering) {
        self.word(offset).store(word, ordering);
    }

    #[inline]
    fn prefetch_for_write(&self, offset: usize) {
        let _address = self.data_pointer(offset, 1);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch accesses no memory.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_ET0 }>(
                _address.cast_const().cast(),
            )
        };
    }

    #[inline]
    fn write(&self, offset: usize, bytes: &[u8]) {
        let target = self.data_pointer(offset, bytes.len());
        // SAFETY: the target is in the mapping and no reference to it exists; the source is a slice
        // elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len()) };
    }

    #[inline]
    fn read(&self, offset: usize, bytes: &mut [u8]) {
        let source = self.data_pointer(offset, bytes.len());
        // SAFETY: as in `write`, in the other direction. If the other process writes at the same
        // time the copy is garbage, which readers expect.
        unsafe { std::ptr::copy_nonoverlapping(source, bytes.as_mut_ptr(), bytes.len()) };
    }

    #[inline]
    fn append(&self, offset: usize, len: usize, out: &mut Vec<u8>) {
        let source = self.data_pointer(offset, len);
        out.reserve(len);
        let old_len = out.len();
        // SAFETY: `len` bytes of spare capacity were reserved, and the copy initializes them before
        // the length covers them.
        unsafe {
            std::ptr::copy_nonoverlapping(source, out.as_mut_ptr().add(old_len), len);
            out.set_len(old_len + len);
        }
    }
}

/// The ends of two rings that one task uses: the rings to and from one peer.
#[derive(Debug)]
pub struct RingPair {
    /// Writing end of the ring to the peer.
    pub writer: RingWriter<SharedRing>,
    /// Reading end of the ring from the peer.
    pub reader: RingReader<SharedRing>,
}

fn map_ring_pair(fd: BorrowedFd<'_>, is_creator: bool) -> io::Result<RingPair> {
    let mapping = Arc::new(Mapping::new(Some(fd), RING_PAIR_BYTES)?);
    let shared_ring = |ring_index: usize| SharedRing {
        mapping: mapping.clone(),
        control_offset: ring_index * size_of::<RingControl>(),
        data_offset: CONTROL_BYTES + ring_index * RING_BYTES,
    };
    let (writer_index, reader_index) = if is_creator { (0, 1) } else { (1, 0) };
    Ok(RingPair {
        writer: RingWriter::new(shared_ring(writer_index)),
        reader: RingReader::new(shared_ring(reader_index)),
    })
}

/// Creates the memory of a pair of rings. Returns this task's ends, and the descriptor with which
/// the peer maps the memory.
///
/// # Errors
/// No descriptors or no memory are available.
pub fn create_ring_pair() -> io::Result<(RingPair, OwnedFd)> {
    let fd = create_sealed_memfd(c"sempa-rings", RING_PAIR_BYTES)?;
    Ok((map_ring_pair(fd.as_fd(), true)?, fd))
}

/// Maps the memory of a pair of rings that another task created.
///
/// # Errors
/// The descriptor is not a sealed memory file of [`RING_PAIR_BYTES`] bytes, or no memory is
/// available.
pub fn map_peer_ring_pair(fd: BorrowedFd<'_>) -> io::Result<RingPair> {
    verify_memfd(fd, RING_PAIR_BYTES, required_seals())?;
    map_ring_pair(fd, false)
}

/// Doorbell of another task, mapped into this process.
#[derive(Debug)]
pub struct PeerDoorbell(Mapping);

impl PeerDoorbell {
    /// Maps the doorbell that another task created.
    ///
    /// # Errors
    /// The descriptor is not a sealed memory file of [`DOORBELL_BYTES`] bytes, or no memory is
    /// available.
    pub fn map(fd: BorrowedFd<'_>) -> io::Result<Self> {
        verify_memfd(fd, DOORBELL_BYTES, required_seals())?;
        Mapping::new(Some(fd), DOORBELL_BYTES).map(PeerDoorbell)
    }
}

impl std::ops::Deref for PeerDoorbell {
    type Target = Doorbell;
    #[inline]
    fn deref(&self) -> &Doorbell {
        doorbell_at(&self.0)
    }
}

#[inline]
fn doorbell_at(mapping: &Mapping) -> &Doorbell {
    // SAFETY: the mapping is large enough and aligned, and a doorbell consists of atomics for which
    // any bytes are valid.
    unsafe { &*mapping.start.as_ptr().cast::<Doorbell>() }
}

/// Doorbell of this task. Its address never changes, so threads may sleep on the doorbell while the
/// memory at this address is replaced. The memory is private until the task offers or accepts the
/// first ring, and during a migration. Otherwise the memory is shared.
#[derive(Debug)]
pub struct OwnDoorbell(Mapping);

impl std::ops::Deref for OwnDoorbell {
    type Target = Doorbell;
    #[inline]
    fn deref(&self) -> &Doorbell {
        doorbell_at(&self.0)
    }
}

impl OwnDoorbell {
    /// Creates a doorbell in private memory.
    ///
    /// # Errors
    /// No memory is available.
    pub fn new() -> io::Result<Self> {
        Mapping::new(None, DOORBELL_BYTES).map(OwnDoorbell)
    }

    /// Replaces the doorbell's memory by shared memory, and wakes all threads that sleep on the
    /// doorbell. Returns the descriptor with which peers map the memory.
    ///
    /// # Errors
    /// No descriptors or no memory are available; the doorbell is unchanged.
    pub fn share(&self) -> io::Result<OwnedFd> {
        let fd = create_sealed_memfd(c"sempa-bell", DOORBELL_BYTES)?;
        self.replace_memory(Mapping::new(Some(fd.as_fd()), DOORBELL_BYTES)?)?;
        Ok(fd)
    }

    /// Replaces the doorbell's memory by private memory, which no other process can access, and
    /// wakes all threads that sleep on the doorbell.
    ///
    /// # Errors
    /// No memory is available; the doorbell is unchanged.
    pub fn unshare(&self) -> io::Result<()> {
        self.replace_memory(Mapping::new(None, DOORBELL_BYTES)?)
    }

    fn replace_memory(&self, new_mapping: Mapping) -> io::Result<()> {
        doorbell_at(&new_mapping).init_from_predecessor(self);
        self.change_sleep_word();
        futex::wake_all(self.sleep_word());
        self.request_drainer();
        futex::wake_all(self.drainer_word());
        replace(&self.0, new_mapping)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doorbell::WakeTarget;
    use std::time::{Duration, Instant};

    #[test]
    fn records_pass_both_ways_through_a_pair() {
        let (mut a, fd) = create_ring_pair().expect("made");
        let mut b = map_peer_ring_pair(fd.as_fd()).expect("good");
        assert!(a.writer.write([b"to ", b"b"]).expect("good"));
        assert!(b.writer.write([b"to a"]).expect("good"));
        for (ring_pair, text) in [(&mut a, "to a"), (&mut b, "to b")] {
            let mut received_bytes = Vec::new();
            ring_pair
                .reader
                .next_record()
                .expect("good")
                .expect("there")
                .append_to(&mut received_bytes);
            assert_eq!(received_bytes, text.as_bytes());
        }
    }

    #[test]
    fn unsealed_or_small_memory_is_refused() {
        let unsealed_fd = memfd_create(c"x", MFdFlags::MFD_ALLOW_SEALING).expect("made");
        ftruncate(&unsealed_fd, RING_PAIR_BYTES as i64).expect("sized");
        assert!(map_peer_ring_pair(unsealed_fd.as_fd()).is_err());
        let small_fd = create_sealed_memfd(c"x", RING_PAIR_BYTES / 2).expect("made");
        assert!(map_peer_ring_pair(small_fd.as_fd()).is_err());
        assert!(PeerDoorbell::map(small_fd.as_fd()).is_err());
        let (pipe, _) = nix::unistd::pipe().expect("made");
        assert!(map_peer_ring_pair(pipe.as_fd()).is_err());
    }

    #[test]
    fn peer_notification_wakes_sleepers() {
        let own_doorbell = OwnDoorbell::new().expect("made");
        let fd = own_doorbell.share().expect("shared");
        let peer_doorbell = PeerDoorbell::map(fd.as_fd()).expect("mapped");
        let word_value = own_doorbell.prepare_sleep();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let deadline = Instant::now() + Duration::from_secs(60);
                while own_doorbell.sleep_word().load(Ordering::SeqCst) == word_value
                    && Instant::now() < deadline
                {
                    futex::wait(
                        own_doorbell.sleep_word(),
                        word_value,
                        Some(Duration::from_secs(1)),
                    );
                }
            });
            assert_eq!(peer_doorbell.notify(7, false), WakeTarget::Sleepers);
            futex::wake_all(peer_doorbell.sleep_word());
        });
        assert_eq!(own_doorbell.next_pending_word(0), Some((0, 1 << 7)));
    }

    #[test]
    fn unsharing_wakes_sleepers_and_isolates_doorbell() {
        let own_doorbell = OwnDoorbell::new().expect("made");
        let peer_doorbell =
            PeerDoorbell::map(own_doorbell.share().expect("shared").as_fd()).expect("mapped");
        let word_value = own_doorbell.prepare_sleep();
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| {
                while own_doorbell.sleep_word().load(Ordering::SeqCst) == word_value {
                    futex::wait(own_doorbell.sleep_word(), word_value, None);
                }
            });
            own_doorbell.unshare().expect("unshared");
            sleeper.join().expect("woken");
        });
        peer_doorbell.notify(3, true);
        assert_eq!(own_doorbell.next_pending_word(0), None);
    }
}
