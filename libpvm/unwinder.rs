//! For the build scripts of the shared libraries: which unwinder they take.

/// Rust asks for the compiler's shared one. A task that loads that starts a tenth of a millisecond
/// later, most of which goes into asking the processor what it is; so a library takes the static
/// one along.
pub(crate) fn take_along() {
    let folder = std::path::PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"))
        .join("unwinder");
    std::fs::create_dir_all(&folder).expect("cargo's folder can be written");
    // What the linker finds first under the shared one's name: a script that names the static one.
    std::fs::write(folder.join("libgcc_s.so"), "INPUT(-lgcc_eh -lgcc)\n")
        .expect("cargo's folder can be written");
    println!("cargo:rustc-link-search=native={}", folder.display());
}
