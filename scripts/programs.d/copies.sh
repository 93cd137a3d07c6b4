# Programs that copy trees with everything that belongs to files.

make_attributes() {
    cd "$1" || return
    mkdir -p d/e .hidden 'name with space'
    head -c 300000 /dev/zero | tr '\0' a >d/large
    truncate -s 5M d/sparse && printf end | dd of=d/sparse bs=1 seek=4000000 conv=notrunc status=none
    echo text >d/file && ln d/file d/second && ln d/file 'name with space/third'
    ln -s ../d/file d/e/link && ln -s nowhere dangling
    mkfifo fifo && mknod null c 1 3 && mknod block b 7 99
    setfattr -n user.note -v 'some text' d/file
    setfattr -n trusted.note -v root d
    setfattr -n security.capability -v 0sAQAAAgAgAAAAAAAAAAAAAAAAAAA= d/large
    setfacl -m u:daemon:rwx,g:bin:r,m:rx d/file
    setfacl -d -m u:daemon:rwx,o::- d
    touch 'd/made after the default'
    chown daemon:bin d/large && chmod 4750 d/large && chmod 1777 d/e && chmod 2755 .hidden
    find . -exec touch -h -d '2020-01-01 00:00:00.5' {} +
    touch -h -d '2001-02-03 04:05:06.123456789' d/file dangling d/e
    touch -d '1910-01-01' d/large
}

# All that is kept of a tree, but for device numbers and times of change.
everything() {
    (cd "$1" && find . -name .out -prune -o ! -name . -printf '%y %m %U:%G %n %T@ %p %l\n' |
        sed -E 's/^d ([0-9]+ [0-9:]+) [0-9]+/d \1/' | sort -k6)
    (cd "$1" && find . -name .out -prune -o -type f -printf '%s %p\n' | sort)
    (cd "$1" && find . -name .out -prune -o -print0 | sort -z | xargs -0 getfattr -h -d -m - -e hex)
    (cd "$1" && find . -name .out -prune -o ! -type l -print0 | sort -z | xargs -0 getfacl -n)
    (cd "$1" && find . -name .out -prune -o -type f -print0 | sort -z | xargs -0 sha256sum)
}

needs_rsync="rsync setfacl setfattr"
make_rsync() { make_attributes "$1"; }
use_rsync() {
    rsync -aHAXS --exclude=.out "$1/" "$2/copy" || return
    everything "$2/copy" | sed "/^d.* \.\$/d"
    # A second run sends nothing, in both directions.
    rsync -aHAXSi --checksum --exclude=.out "$1/" "$2/copy" | grep -v ' \./$'
    rsync -aHAXSin --exclude=.out "$2/copy/" "$1" | grep -v ' \./$'
    echo more >>"$1/d/file" && rm "$1/fifo"
    rsync -aHAXSi --delete --exclude=.out "$1/" "$2/copy" | grep -v ' \./$'
    rsync -aHAXS --inplace --exclude=.out "$1/" "$2/copy"
    rsync -aHAXSin --exclude=.out "$1/" "$2/copy" | grep -v ' \./$'
    rsync -a --link-dest="$2/copy" --exclude=.out "$1/" "$2/third"
    find "$2/third" -type f -printf '%n %P\n' | sort
}

needs_cp="setfacl setfattr"
make_cp() { make_attributes "$1"; }
use_cp() {
    everything "$1"
    cp -al "$1/d" "$2/links" && find "$2/links" -printf '%y %n %P\n' | sed 's/^d [0-9]*/d/' | sort
    find "$1/d" -type f -printf '%n %P\n' | sort
    cp -a "$1/d" "$2/copy" && everything "$2/copy"
    cp --sparse=always "$1/d/sparse" "$2/sparse" && cmp "$1/d/sparse" "$2/sparse" && stat -c '%b' "$2/sparse"
    cp -au "$1/d" "$2/copy" && mv "$1/d" "$2/moved" && everything "$2/moved" && mv "$2/moved" "$1/d"
    ln "$1/d/file" "$2/hard" && mv "$2/hard" "$1/d/second" && stat -c %h "$1/d/file" "$2/hard"
    rm -rf "$2/links" && find "$1/d" -type f -printf '%n %P\n' | sort
    install -D -m 4711 -o daemon "$1/d/file" "$2/i/n/file" && stat -c '%a %U' "$2/i/n/file"
}

needs_tar="setfacl setfattr"
make_tar() { make_attributes "$1"; }
use_tar() {
    local all=(--acls --xattrs --xattrs-include='*' --sparse --numeric-owner --sort=name)
    tar "${all[@]}" -C "$1" --exclude=.out -cf "$2/a.tar" . || return
    mkdir "$2/x" && tar "${all[@]}" -C "$2/x" -xpf "$2/a.tar" || return
    everything "$2/x"
    tar "${all[@]}" -C "$2/x" -df "$2/a.tar"
    tar "${all[@]}" -C "$2/x" -cf - . | tar -tvf - | grep -v ' \./$' | sort
    tar -C "$1" --exclude=.out -g "$2/snar" -cf "$2/full.tar" . && sleep 0.01 && echo new >"$1/d/new"
    tar -C "$1" --exclude=.out -g "$2/snar" -cf "$2/more.tar" . && tar -tf "$2/more.tar" | grep -v -e '/$' | sort
}
