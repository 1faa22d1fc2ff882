//! Files that a Fortran program needs: the archive to link and the header to include, as `cargo
//! xtask install` installs them.

/// Content of the archive `libfpvm3.a`.
pub const ARCHIVE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libfpvm3.a"));

/// Content of the header file `fpvm3.h`.
pub const HEADER: &str = include_str!(concat!(env!("OUT_DIR"), "/fpvm3.h"));
