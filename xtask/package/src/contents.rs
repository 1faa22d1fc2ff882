//! Which file of an installation goes to which Debian package, and where.
//!
//! Programs are in the table of `xtask-install`. Places are those of Debian's PVM, so that Debian's
//! programs and make files for PVM find what they expect.

use crate::TRIPLET;
use std::path::{Path, PathBuf};
use xtask_install::{DebianPackage, LIBRARIES, Library, PROGRAMS};

/// Where a file goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destination {
    pub package: DebianPackage,
    /// Path below the root of the installed system.
    pub path: PathBuf,
}

fn destination(package: DebianPackage, path: impl Into<PathBuf>) -> Option<Destination> {
    Some(Destination {
        package,
        path: path.into(),
    })
}

/// Links of packages, as (package, path, target), in addition to [`library_links`]. Paths are below
/// the root of the installed system.
pub const LINKS: [(DebianPackage, &str, &str); 13] = [
    (
        DebianPackage::Programs,
        "usr/bin/pvmgetarch",
        "../lib/pvm3/lib/pvmgetarch",
    ),
    (
        DebianPackage::Programs,
        "usr/lib/pvm3/lib/pvm",
        "../../../bin/pvm",
    ),
    (
        DebianPackage::Programs,
        "usr/lib/pvm3/lib/pvmd",
        "../../../bin/pvmd",
    ),
    (
        DebianPackage::Programs,
        "usr/lib/pvm3/lib/pvmgs",
        "../../../bin/pvmgs",
    ),
    (
        DebianPackage::Programs,
        "usr/lib/pvm3/lib/LINUX64/pvmgs",
        "../../../../bin/pvmgs",
    ),
    (
        DebianPackage::Programs,
        "usr/lib/pvm3/lib/LINUX64/pvm",
        "../../../../bin/pvm",
    ),
    (
        DebianPackage::Programs,
        "usr/lib/pvm3/lib/LINUX64/pvmd3",
        "../../../../bin/pvmd",
    ),
    (
        DebianPackage::Programs,
        "usr/share/man/man1/pvmd3.1.gz",
        "pvmd.1.gz",
    ),
    (
        DebianPackage::Development,
        "usr/bin/aimk",
        "../lib/pvm3/lib/aimk",
    ),
    (DebianPackage::Development, "usr/bin/pvmgroups", "pvm_gstat"),
    (
        DebianPackage::Development,
        "usr/lib/pvm3/include",
        "../../include",
    ),
    (
        DebianPackage::Development,
        "usr/lib/pvm3/lib/LINUX64/libfpvm3.a",
        "../../../x86_64-linux-gnu/libfpvm3.a",
    ),
    (
        DebianPackage::Development,
        "usr/share/man/man1/pvmgroups.1.gz",
        "pvm_gstat.1.gz",
    ),
];

/// Returns the links of the installed libraries, as (package, path, target). Paths are below the
/// root of the installed system.
pub fn library_links(version: &str) -> Vec<(DebianPackage, String, String)> {
    let development = DebianPackage::Development;
    let links_of = |library: &Library| {
        let (name, soname) = (library.name, library.soname);
        [
            (
                library.package,
                format!("usr/lib/{TRIPLET}/{soname}"),
                format!("{soname}.{version}"),
            ),
            (
                development,
                format!("usr/lib/{TRIPLET}/{name}.so"),
                soname.to_string(),
            ),
            (
                development,
                format!("usr/lib/pvm3/lib/LINUX64/{name}.a"),
                format!("../../../{TRIPLET}/{name}.a"),
            ),
        ]
    };
    LIBRARIES.iter().flat_map(links_of).collect()
}

/// Files of the sources that an installation under a prefix does not have, as (path in the sources,
/// package, path in the installed system).
pub const EXTRA_FILES: [(&str, DebianPackage, &str); 7] = [
    (
        "packaging/etc/owner.toml",
        DebianPackage::Node,
        "etc/sempa/owner.toml",
    ),
    (
        "docs/owner.toml",
        DebianPackage::Node,
        "usr/share/doc/sempa-node/examples/owner.toml",
    ),
    (
        "packaging/init/80-sempa.sysctl.example",
        DebianPackage::Node,
        "usr/share/doc/sempa-node/examples/80-sempa.conf",
    ),
    (
        "docs/ADMIN.md",
        DebianPackage::Node,
        "usr/share/doc/sempa-node/ADMIN.md",
    ),
    (
        "packaging/ansible/lab.yml",
        DebianPackage::Node,
        "usr/share/doc/sempa-node/examples/ansible/lab.yml",
    ),
    (
        "packaging/ansible/hosts.ini",
        DebianPackage::Node,
        "usr/share/doc/sempa-node/examples/ansible/hosts.ini",
    ),
    (
        "SECURITY.md",
        DebianPackage::Programs,
        "usr/share/doc/sempa/SECURITY.md",
    ),
];

/// Files that are packaged only with a program, as (program, path in the sources, path in the
/// installed system). They are in the program's package.
pub const FILES_OF_PROGRAMS: [(&str, &str, &str); 1] = [(
    "pvm-taskerd",
    "packaging/init/sempa-taskerd",
    "usr/share/doc/sempa-node/examples/sempa-taskerd.init",
)];

/// Units of systemd that are packaged only with a program, as (program, path in the sources).
/// debhelper knows where the release of Debian has them.
pub const UNITS_OF_PROGRAMS: [(&str, &str); 2] = [
    ("pvm-taskerd", "packaging/systemd/sempa-taskerd.socket"),
    ("pvm-taskerd", "packaging/systemd/sempa-taskerd.service"),
];

/// Returns where a file of an installation goes. `path` is relative to the prefix of the
/// installation. Returns `None` for a file that no package has; see [`is_left_out`].
pub fn destination_of(path: &Path, version: &str) -> Option<Destination> {
    use DebianPackage::{Development, Programs};
    let name = path.file_name()?.to_str()?;
    let folder = path.parent()?.to_str()?;
    let libraries = format!("usr/lib/{TRIPLET}");
    match folder {
        "bin" | "sbin" => {
            let program = PROGRAMS.iter().find(|program| program.name == name)?;
            destination(program.package, format!("usr/{folder}/{name}"))
        }
        "lib" => match name {
            "libfpvm3.a" => destination(Development, format!("{libraries}/{name}")),
            "pvmgetarch" | "pvmtmparch" => {
                destination(Programs, format!("usr/lib/pvm3/lib/{name}"))
            }
            "aimk" => destination(Development, format!("usr/lib/pvm3/lib/{name}")),
            _ => library_destination(name, version),
        },
        "lib/pkgconfig" => destination(Development, format!("{libraries}/pkgconfig/{name}")),
        "include" | "include/sempa-mw" => destination(Development, format!("usr/{folder}/{name}")),
        "conf" => destination(Development, format!("usr/lib/pvm3/conf/{name}")),
        "share/man/man3" => destination(Development, format!("usr/share/man/man3/{name}")),
        "share/man/man1" | "share/man/man8" => {
            let program = name.rsplit_once('.').map_or(name, |(program, _)| program);
            destination(page_package(program)?, format!("usr/{folder}/{name}"))
        }
        _ if folder.starts_with("share/") => destination(Programs, format!("usr/{folder}/{name}")),
        _ => None,
    }
}

/// Returns where a file of a library goes.
fn library_destination(name: &str, version: &str) -> Option<Destination> {
    let libraries = format!("usr/lib/{TRIPLET}");
    let is_archive = |library: &Library| name.strip_suffix(".a") == Some(library.name);
    if LIBRARIES.iter().any(is_archive) {
        return destination(DebianPackage::Development, format!("{libraries}/{name}"));
    }
    let library = LIBRARIES.iter().find(|library| library.soname == name)?;
    destination(library.package, format!("{libraries}/{name}.{version}"))
}

/// Returns the package of the manual page of a program.
fn page_package(program: &str) -> Option<DebianPackage> {
    match program {
        "pvmgetarch" => Some(DebianPackage::Programs),
        "aimk" => Some(DebianPackage::Development),
        name => PROGRAMS
            .iter()
            .find(|program| program.name == name)
            .map(|program| program.package),
    }
}

/// True for files of an installation that packages replace by a link of their own, or do not need.
pub fn is_left_out(path: &Path) -> bool {
    // A link page of the installation; packages have a link to the compressed page.
    let replaced = ["share/man/man1/pvmgroups.1"];
    replaced.iter().any(|replaced| path == Path::new(replaced))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_go_to_the_packages_of_the_table() {
        let pvm = destination_of(Path::new("bin/pvm"), "1").expect("a package");
        assert_eq!(pvm.package, DebianPackage::Programs);
        assert_eq!(pvm.path, Path::new("usr/bin/pvm"));
        let service = destination_of(Path::new("sbin/pvm-taskerd"), "1").expect("a package");
        assert_eq!(service.package, DebianPackage::Node);
        assert_eq!(service.path, Path::new("usr/sbin/pvm-taskerd"));
        assert_eq!(destination_of(Path::new("bin/unknown"), "1"), None);
    }

    #[test]
    fn libraries_have_their_version_in_their_names() {
        let library = destination_of(Path::new("lib/libpvm3.so.3"), "7.8.9").expect("a package");
        assert_eq!(
            library.path,
            Path::new("usr/lib/x86_64-linux-gnu/libpvm3.so.3.7.8.9")
        );
        let links = library_links("7.8.9");
        let link = links.iter().find(|(_, path, _)| path.ends_with(".so.3"));
        assert_eq!(
            link.map(|(_, _, target)| target.as_str()),
            Some("libpvm3.so.3.7.8.9")
        );
    }
}
