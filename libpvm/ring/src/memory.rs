//! Where rings and bells lie: memory of the kernel that two processes map, sealed so that neither can shrink it under the
//! other.
#![allow(unsafe_code)] // Mapping memory, and copying from and to memory that another process may change meanwhile.

use crate::bell::Bell;
use crate::futex;
use crate::ring::{Area, Reader, Words, Writer};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::ftruncate;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// Bytes of data of one ring. The largest record has to fit in a quarter of it, so that reader and writer overlap.
pub const RING_BYTES: usize = 512 << 10;
/// Bytes in front of the data, for the words of both rings.
const WORDS_BYTES: usize = 4096;
/// Bytes of the memory that two tasks share.
pub const PAIR_BYTES: usize = WORDS_BYTES + 2 * RING_BYTES;
/// Bytes of a bell's memory.
pub const BELL_BYTES: usize = 4096;

const _: () = assert!(2 * size_of::<Words>() <= WORDS_BYTES && size_of::<Bell>() <= BELL_BYTES);
const _: () = assert!(RING_BYTES.is_power_of_two());

/// Makes shared memory that is to be sealed.
///
/// # Errors
/// When the system has no descriptors or memory left, or does not let the program have files of this size: memory beyond
/// that limit would end the program with SIGXFSZ.
pub(crate) fn make(name: &std::ffi::CStr, bytes: usize) -> io::Result<OwnedFd> {
    let (size_max, _) = getrlimit(Resource::RLIMIT_FSIZE)?;
    if size_max < bytes as u64 {
        return Err(io::Error::from(io::ErrorKind::FileTooLarge));
    }
    let fd = memfd_create(name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
    ftruncate(&fd, i64::try_from(bytes).expect("small"))?;
    Ok(fd)
}

/// Makes sealed shared memory for two writers.
fn make_sealed(name: &std::ffi::CStr, bytes: usize) -> io::Result<OwnedFd> {
    let fd = make(name, bytes)?;
    fcntl(&fd, FcntlArg::F_ADD_SEALS(seals()))?;
    Ok(fd)
}

fn seals() -> SealFlag {
    SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL
}

/// Refuses what another task passes off as such memory: a smaller one would end this process when it is touched.
pub(crate) fn check(fd: BorrowedFd<'_>, bytes: usize, seals: SealFlag) -> io::Result<()> {
    let unfit = |what: &str| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("a descriptor for shared memory {what}"),
        )
    };
    let has = fcntl(fd, FcntlArg::F_GET_SEALS).map_err(|_| unfit("is none"))?;
    if !SealFlag::from_bits_truncate(has).contains(seals) {
        return Err(unfit("is not sealed"));
    }
    let size = nix::sys::stat::fstat(fd)?.st_size;
    if usize::try_from(size) != Ok(bytes) {
        return Err(unfit(&format!("has {size} bytes instead of {bytes}")));
    }
    Ok(())
}

/// Mapped memory, gone with its last owner.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the memory belongs to nobody in particular; all access goes through atomics or by copying with raw pointers.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps shared memory, or with `None` memory of this process. A forked child gets none of it.
    pub(crate) fn new(fd: Option<BorrowedFd<'_>>, bytes: usize) -> io::Result<Mapping> {
        let (flags, number) = match fd {
            Some(fd) => (libc::MAP_SHARED, fd.as_raw_fd()),
            None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
        };
        let mapping = Mapping::map(bytes, libc::PROT_READ | libc::PROT_WRITE, flags, number)?;
        // SAFETY: the range is the mapping just made.
        if unsafe { libc::madvise(mapping.start().cast(), bytes, libc::MADV_DONTFORK) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(mapping)
    }

    /// Maps shared memory that is only read, also by a forked child.
    pub(crate) fn to_read(fd: BorrowedFd<'_>, bytes: usize) -> io::Result<Mapping> {
        Mapping::map(bytes, libc::PROT_READ, libc::MAP_SHARED, fd.as_raw_fd())
    }

    /// Memory of this process, and of a forked child's, of which little will be used.
    pub(crate) fn spare(bytes: usize) -> io::Result<Mapping> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        Mapping::map(bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1)
    }

    fn map(bytes: usize, protection: i32, flags: i32, number: i32) -> io::Result<Mapping> {
        // SAFETY: a fresh mapping at an address of the kernel's choice touches nothing that exists.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, number, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).expect("the kernel maps nothing at 0 unless asked");
        Ok(Mapping { start, bytes })
    }

    /// Where it begins.
    #[inline]
    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

/// Puts fresh memory in the place of other memory of the same size, in one step. Whoever uses the place must find the fresh
/// memory as good.
pub(crate) fn replace(old: &Mapping, fresh: Mapping) -> io::Result<()> {
    assert_eq!(
        old.bytes, fresh.bytes,
        "one takes the whole place of the other"
    );
    let fresh = std::mem::ManuallyDrop::new(fresh);
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    let (from, to): (*mut libc::c_void, *mut libc::c_void) =
        (fresh.start().cast(), old.start().cast());
    // SAFETY: both ranges are mappings of this size made by `Mapping`; the old one is replaced in one step by memory that is as
    // good for everything that refers to it, and the fresh one has no other user.
    let moved: *mut libc::c_void = unsafe { libc::mremap(from, old.bytes, old.bytes, flags, to) };
    if moved == libc::MAP_FAILED {
        let error = io::Error::last_os_error();
        drop(std::mem::ManuallyDrop::into_inner(fresh));
        return Err(error);
    }
    Ok(())
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `new` and nobody has a pointer into it any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// One ring in the memory of a pair.
#[derive(Clone, Debug)]
pub struct Shared {
    mapping: Arc<Mapping>,
    words: usize,
    data: usize,
}

impl Shared {
    #[inline]
    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset <= RING_BYTES && len <= RING_BYTES - offset,
            "ranges end within the ring"
        );
        // SAFETY: the offset was just checked, and the data lies within the mapping by its constants.
        unsafe { self.mapping.start.as_ptr().add(self.data + offset) }
    }
}

impl Area for Shared {
    #[inline]
    fn words(&self) -> &Words {
        // SAFETY: the words lie at the beginning of the mapping, aligned, and are atomics for which any bytes are good.
        unsafe { &*self.mapping.start.as_ptr().add(self.words).cast::<Words>() }
    }

    #[inline]
    fn capacity(&self) -> usize {
        RING_BYTES
    }

    #[inline]
    fn write(&self, offset: usize, bytes: &[u8]) {
        let to = self.at(offset, bytes.len());
        // SAFETY: the target is in the mapping and no reference to it exists; the source is a slice elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    #[inline]
    fn read(&self, offset: usize, bytes: &mut [u8]) {
        let from = self.at(offset, bytes.len());
        // SAFETY: as in `write`, the other way. The other process may write at the same time; then the copy is garbage,
        // which readers expect.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
    }

    #[inline]
    fn append(&self, offset: usize, len: usize, out: &mut Vec<u8>) {
        let from = self.at(offset, len);
        out.reserve(len);
        let old = out.len();
        // SAFETY: `len` bytes of spare capacity were reserved, and are initialised by the copy before the length covers them.
        unsafe {
            std::ptr::copy_nonoverlapping(from, out.as_mut_ptr().add(old), len);
            out.set_len(old + len);
        }
    }
}

/// The two ends that one task has.
#[derive(Debug)]
pub struct Ends {
    /// For what it sends.
    pub writer: Writer<Shared>,
    /// For what it gets.
    pub reader: Reader<Shared>,
}

fn ends(fd: BorrowedFd<'_>, offers: bool) -> io::Result<Ends> {
    let mapping = Arc::new(Mapping::new(Some(fd), PAIR_BYTES)?);
    let area = |number: usize| Shared {
        mapping: mapping.clone(),
        words: number * size_of::<Words>(),
        data: WORDS_BYTES + number * RING_BYTES,
    };
    let (out, back) = if offers { (0, 1) } else { (1, 0) };
    Ok(Ends {
        writer: Writer::new(area(out)),
        reader: Reader::new(area(back)),
    })
}

/// Makes the memory of a pair: the own ends, and the descriptor for the other task.
///
/// # Errors
/// When the system has no descriptors or memory left.
pub fn offer() -> io::Result<(Ends, OwnedFd)> {
    let fd = make_sealed(c"sempa-rings", PAIR_BYTES)?;
    Ok((ends(fd.as_fd(), true)?, fd))
}

/// Takes the memory of a pair that another task has made.
///
/// # Errors
/// When it is not such memory, or the system has none left.
pub fn accept(fd: BorrowedFd<'_>) -> io::Result<Ends> {
    check(fd, PAIR_BYTES, seals())?;
    ends(fd, false)
}

/// The bell of another task.
#[derive(Debug)]
pub struct PeerBell(Mapping);

impl PeerBell {
    /// Maps the bell that another task has made.
    ///
    /// # Errors
    /// When it is not such memory, or the system has none left.
    pub fn map(fd: BorrowedFd<'_>) -> io::Result<PeerBell> {
        check(fd, BELL_BYTES, seals())?;
        Mapping::new(Some(fd), BELL_BYTES).map(PeerBell)
    }
}

impl std::ops::Deref for PeerBell {
    type Target = Bell;
    #[inline]
    fn deref(&self) -> &Bell {
        bell(&self.0)
    }
}

#[inline]
fn bell(mapping: &Mapping) -> &Bell {
    // SAFETY: the mapping is large enough and aligned, and a bell is atomics for which any bytes are good.
    unsafe { &*mapping.start.as_ptr().cast::<Bell>() }
}

/// The bell of this task. It stays at its address for life, so that threads may sleep on it while the memory behind it
/// changes: private at first and while the task is moved, shared as long as it has rings.
#[derive(Debug)]
pub struct OwnBell(Mapping);

impl std::ops::Deref for OwnBell {
    type Target = Bell;
    #[inline]
    fn deref(&self) -> &Bell {
        bell(&self.0)
    }
}

impl OwnBell {
    /// A bell in private memory.
    ///
    /// # Errors
    /// When the system has no memory left.
    pub fn new() -> io::Result<OwnBell> {
        Mapping::new(None, BELL_BYTES).map(OwnBell)
    }

    /// Puts shared memory behind the bell; the descriptor is for peers.
    ///
    /// # Errors
    /// When the system has no descriptors or memory left; the bell is as it was.
    pub fn share(&self) -> io::Result<OwnedFd> {
        let fd = make_sealed(c"sempa-bell", BELL_BYTES)?;
        self.replace(Mapping::new(Some(fd.as_fd()), BELL_BYTES)?)?;
        Ok(fd)
    }

    /// Puts private memory behind the bell: nothing of it leads out of the process.
    ///
    /// # Errors
    /// When the system has no memory left; the bell is as it was.
    pub fn unshare(&self) -> io::Result<()> {
        self.replace(Mapping::new(None, BELL_BYTES)?)
    }

    fn replace(&self, fresh: Mapping) -> io::Result<()> {
        bell(&fresh).follow(self);
        self.stir();
        futex::wake_all(self.word());
        self.call_ear();
        futex::wake_all(self.ear());
        replace(&self.0, fresh)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bell::Wake;
    use std::time::{Duration, Instant};

    #[test]
    fn two_processes_talk_through_a_pair() {
        let (mut a, fd) = offer().expect("made");
        let mut b = accept(fd.as_fd()).expect("good");
        assert!(a.writer.write([b"to ", b"b"]).expect("good"));
        assert!(b.writer.write([b"to a"]).expect("good"));
        for (end, text) in [(&mut a, "to a"), (&mut b, "to b")] {
            let mut got = Vec::new();
            end.reader
                .next_record()
                .expect("good")
                .expect("there")
                .append_to(&mut got);
            assert_eq!(got, text.as_bytes());
        }
    }

    #[test]
    fn memory_that_could_shrink_or_is_too_small_is_refused() {
        let loose = memfd_create(c"x", MFdFlags::MFD_ALLOW_SEALING).expect("made");
        ftruncate(&loose, PAIR_BYTES as i64).expect("sized");
        assert!(accept(loose.as_fd()).is_err());
        let small = make_sealed(c"x", PAIR_BYTES / 2).expect("made");
        assert!(accept(small.as_fd()).is_err());
        assert!(PeerBell::map(small.as_fd()).is_err());
        let (pipe, _) = nix::unistd::pipe().expect("made");
        assert!(accept(pipe.as_fd()).is_err());
    }

    #[test]
    fn a_peer_rings_the_bell_of_another_and_wakes_who_sleeps() {
        let own = OwnBell::new().expect("made");
        let fd = own.share().expect("shared");
        let peer = PeerBell::map(fd.as_fd()).expect("mapped");
        let seen = own.about_to_sleep();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let until = Instant::now() + Duration::from_secs(60);
                while own.word().load(std::sync::atomic::Ordering::SeqCst) == seen
                    && Instant::now() < until
                {
                    futex::wait(own.word(), seen, Some(Duration::from_secs(1)));
                }
            });
            assert_eq!(peer.ring(7, false), Wake::Sleepers);
            futex::wake_all(peer.word());
        });
        assert_eq!(own.rung(0), Some((0, 1 << 7)));
    }

    #[test]
    fn an_unshared_bell_is_out_of_reach_and_those_who_slept_on_it_wake() {
        let own = OwnBell::new().expect("made");
        let peer = PeerBell::map(own.share().expect("shared").as_fd()).expect("mapped");
        let seen = own.about_to_sleep();
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| {
                while own.word().load(std::sync::atomic::Ordering::SeqCst) == seen {
                    futex::wait(own.word(), seen, None);
                }
            });
            own.unshare().expect("unshared");
            sleeper.join().expect("woken");
        });
        peer.ring(3, true);
        assert_eq!(own.rung(0), None);
    }
}
