#!/bin/sh
# Installs Sempa from this archive under a prefix, or removes it from there.
#
#   install.sh [--prefix DIR] [--uninstall]
#
# Each file is renamed to its place, so running programs keep the file with which they started. The
# list of installed files is kept in DIR/share/sempa/MANIFEST; files of an earlier version that this
# one lacks are removed.
set -eu

prefix=/opt/sempa
action=install

fail() {
	echo "install.sh: $1" >&2
	exit 1
}

while [ $# -gt 0 ]; do
	case $1 in
	--prefix)
		[ $# -ge 2 ] || fail "--prefix needs a folder"
		prefix=$2
		shift 2
		;;
	--prefix=*)
		prefix=${1#--prefix=}
		shift
		;;
	--uninstall)
		action=uninstall
		shift
		;;
	-h | --help)
		sed -n '2,9s/^# \{0,1\}//p' "$0"
		exit 0
		;;
	*)
		fail "unknown argument $1; --help lists the arguments"
		;;
	esac
done

case $prefix in
/*) ;;
*) fail "the prefix must be an absolute path, not '$prefix'" ;;
esac
here=$(dirname "$(readlink -f "$0")")
list=$prefix/share/sempa/MANIFEST

# Removes a file of the installation, and the folders that become empty.
remove() {
	rm -f "$prefix/$1"
	folder=$(dirname "$1")
	while [ "$folder" != . ]; do
		rmdir "$prefix/$folder" 2>/dev/null || return 0
		folder=$(dirname "$folder")
	done
}

if [ "$action" = uninstall ]; then
	[ -r "$list" ] || fail "$list is missing, so nothing is installed in $prefix by this script"
	manifest=$(mktemp)
	trap 'rm -f "$manifest"' EXIT
	cp "$list" "$manifest"
	while IFS= read -r path; do
		remove "$path"
	done <"$manifest"
	remove share/sempa/MANIFEST
	# Folders that the archive has without files.
	for folder in bin/LINUX64 bin; do
		rmdir "$prefix/$folder" 2>/dev/null || true
	done
	rmdir "$prefix" 2>/dev/null || true
	echo "removed from $prefix"
	exit 0
fi

[ "$(uname -s) $(uname -m)" = "Linux x86_64" ] || fail "these programs run on x86-64 Linux only"
"$here/files/bin/pvm" --version >/dev/null ||
	fail "the programs do not run here; they need a C library at least as new as that of the machine on which this archive was made"

mkdir -p "$prefix/share/sempa" "$prefix/bin/LINUX64"
while IFS= read -r path; do
	source=$here/files/$path
	target=$prefix/$path
	mkdir -p "$(dirname "$target")"
	fresh=$(dirname "$target")/.$(basename "$target").$$
	if [ -h "$source" ]; then
		ln -s "$(readlink "$source")" "$fresh"
	else
		case $path in
		lib/pkgconfig/*) sed "s|@PREFIX@|$prefix|g" "$source" >"$fresh" ;;
		*) cp "$source" "$fresh" ;;
		esac
		if [ -x "$source" ]; then chmod 755 "$fresh"; else chmod 644 "$fresh"; fi
	fi
	mv -f "$fresh" "$target"
done <"$here/MANIFEST"

if [ -r "$list" ]; then
	sort "$list" >"$list.old.$$"
	sort "$here/MANIFEST" >"$list.new.$$"
	comm -23 "$list.old.$$" "$list.new.$$" | while IFS= read -r path; do
		remove "$path"
	done
	rm -f "$list.old.$$" "$list.new.$$"
fi
cp "$here/MANIFEST" "$list"

echo "installed in $prefix; for your shell:"
echo "  export PATH=$prefix/bin:\$PATH LD_LIBRARY_PATH=$prefix/lib"
if [ -x "$prefix/sbin/pvm-taskerd" ]; then
	echo "for tasks of ordinary users to migrate, root starts $prefix/sbin/pvm-taskerd on each host"
	echo "(units for systemd are in $here/units; set the path in ExecStart)"
fi
