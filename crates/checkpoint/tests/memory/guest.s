# A guest that fits into a boot sector and finds out whether it was put together of different instants. It counts: in a
# register, in 448 KiB of memory and in 256 sectors of its disk in turn. Each round it says K; or E, and no more, when two
# of them differ.
#
#   as --32 -o guest.o guest.s && ld -m elf_i386 -Ttext 0x7c00 --oformat binary -o guest.bin guest.o
#
# machine.rs has the bytes.
.code16
start:
  xor %ax,%ax
  mov %ax,%ds
  mov %ax,%ss
  mov $0x7c00,%sp
  cld
  xor %ebp,%ebp
  jmp fill
verify:
  mov $0x1000,%bx
1: mov %bx,%es
  xor %di,%di
  mov $0x4000,%cx
  mov %ebp,%eax
  repe scasl
  jne wrong
  add $0x1000,%bx
  cmp $0x8000,%bx
  jb 1b
  # The sector of this round has it.
  mov %ebp,%eax
  mov $0x4200,%dx
  call disk
  cmp 0x600,%ebp
  jne wrong
  # That of the next round is as 256 rounds ago.
  inc %ebp
  mov %ebp,%eax
  mov $0x4200,%dx
  call disk
  mov %ebp,%eax
  sub $256,%eax
  jnc 2f
  xor %eax,%eax
2: cmp 0x600,%eax
  jne wrong
fill:
  mov $0x1000,%bx
3: mov %bx,%es
  xor %di,%di
  mov $0x4000,%cx
  mov %ebp,%eax
  rep stosl
  add $0x1000,%bx
  cmp $0x8000,%bx
  jb 3b
  mov %ebp,0x600
  mov %ebp,%eax
  mov $0x4300,%dx
  call disk
  mov $'K',%al
  mov $0x3f8,%dx
  out %al,%dx
  jmp verify
  # Reads or writes (dx) the sector of a round (eax).
disk:
  movzbw %al,%ax
  inc %ax
  mov %ax,packet+8
  mov %dx,%ax
  mov $packet,%si
  mov $0x80,%dl
  int $0x13
  jc wrong
  ret
wrong:
  mov $'E',%al
  mov $0x3f8,%dx
  out %al,%dx
4: hlt
  jmp 4b
packet: .byte 16,0
  .word 1,0x600,0
  .quad 1
end:
.org 510
.word 0xaa55
