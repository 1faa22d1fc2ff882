//! The table of installed C libraries: their files, headers and files for pkg-config.

use crate::programs::DebianPackage;

/// A C library with its shared form, its archive, its headers and its files for pkg-config. All
/// paths of sources are below the project's folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Library {
    /// Name of the files without their endings.
    pub name: &'static str,
    /// Name by which the loader finds the shared library.
    pub soname: &'static str,
    /// Debian package of the shared library. The package with what programmers need has the rest.
    pub package: DebianPackage,
    /// Headers, as (path in the sources, folder below the prefix).
    pub headers: &'static [(&'static str, &'static str)],
    /// Folders of further headers in C++, as (path in the sources, folder below the prefix).
    pub header_folders: &'static [(&'static str, &'static str)],
    /// Templates of files for pkg-config.
    pub package_configs: &'static [&'static str],
}

/// All installed libraries that have a shared form.
pub const LIBRARIES: [Library; 4] = [
    Library {
        name: "libpvm3",
        soname: "libpvm3.so.3",
        package: DebianPackage::Library,
        headers: &[
            ("libpvm/capi/include/pvm3.h", "include"),
            ("libpvm/capi/include/pvmproto.h", "include"),
            ("libpvm/capi/include/pvmtev.h", "include"),
        ],
        header_folders: &[],
        package_configs: &["libpvm/capi/pvm3.pc.in"],
    },
    Library {
        name: "libgpvm3",
        soname: "libgpvm3.so.3",
        package: DebianPackage::Library,
        headers: &[],
        header_folders: &[],
        package_configs: &["libpvm/group/gpvm3.pc.in"],
    },
    Library {
        name: "libsempa_work",
        soname: "libsempa_work.so.1",
        package: DebianPackage::WorkLibrary,
        headers: &[("master-worker/capi/include/sempa_work.h", "include")],
        header_folders: &[("master-worker/capi/cpp", "include/sempa-mw")],
        package_configs: &[
            "master-worker/capi/sempa_work.pc.in",
            "master-worker/capi/sempa_mw.pc.in",
        ],
    },
    Library {
        name: "libsempa_broker",
        soname: "libsempa_broker.so.1",
        package: DebianPackage::BrokerLibrary,
        headers: &[("broker/capi/include/smbl.h", "include")],
        header_folders: &[],
        package_configs: &["broker/capi/sempa_broker.pc.in"],
    },
];
